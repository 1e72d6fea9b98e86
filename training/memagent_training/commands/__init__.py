"""Commands of `memagent` that train, found through entry points in the group "memagent.commands"."""
