"""What a user would do without the reader: one call with as much as fits, or a chain of calls over chunks.

Every baseline streams the document from the store, and asks the policy by the reader's own rules (`asking`), in one of
two wordings (`dialogues`).
"""
