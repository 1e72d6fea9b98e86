"""Files of every type: facts that converters easily lose are in the text, and omissions are reported."""

from __future__ import annotations

import re

import pytest
from support.made_documents import Case, make_documents

from memagent_graph.documents import Document
from memagent_graph.errors import DocumentError


@pytest.mark.parametrize("case", make_documents(), ids=lambda case: case.name)
@pytest.mark.usefixtures("in_process_conversion")
def test_the_facts_of_a_document_are_in_its_text_and_omissions_are_listed(case: Case, store):
    document = Document.from_bytes(case.data, name=case.name)
    if case.error:
        with pytest.raises(DocumentError, match=re.escape(case.error)) as error:
            store.add(document)
        assert error.value.hint
        return
    ref = store.add(document)
    text = store.read(ref, 0, ref["size"])
    assert ref["media_type"] == document.media_type
    assert ref["size"] < 1_000_000, "a small file can claim a large size"
    assert [fact for fact in case.facts if fact not in text] == [], text
    assert [lost_text for lost_text in case.lost if lost_text in text] == [], text
    omissions = [
        f"{omission['count']} {omission['what']}" + (f" ({omission['places']})" if omission["places"] else "")
        for omission in ref.get("omissions", ())
    ]
    for expected_start, omission_text in zip(case.omissions, omissions, strict=True):
        assert omission_text.startswith(expected_start)
    if case.headings:
        assert tuple(mark.label for mark in store.headings(ref)) == case.headings
