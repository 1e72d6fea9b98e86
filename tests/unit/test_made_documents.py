"""Documents of every kind: the fact that is easily lost is in the text, and what is lost is told."""

from __future__ import annotations

import re

import pytest
from support.made_documents import Case, make_documents

from memagent_graph.documents import Document
from memagent_graph.errors import DocumentError


@pytest.mark.parametrize("made", make_documents(), ids=lambda made: made.name)
@pytest.mark.usefixtures("in_process_conversion")
def test_a_documents_fact_is_in_its_text_and_its_losses_are_told(made: Case, store):
    document = Document.from_bytes(made.data, name=made.name)
    if made.error:
        with pytest.raises(DocumentError, match=re.escape(made.error)) as error:
            store.add(document)
        assert error.value.hint
        return
    ref = store.add(document)
    text = store.read(ref, 0, ref["size"])
    assert ref["media_type"] == document.media_type
    assert ref["size"] < 1_000_000, "a small file may claim much space"
    assert [fact for fact in made.facts if fact not in text] == [], text
    assert [lost for lost in made.lost if lost in text] == [], text
    omissions = [
        f"{omission['count']} {omission['what']}" + (f" ({omission['places']})" if omission["places"] else "")
        for omission in ref.get("omissions", ())
    ]
    for begin, whole in zip(made.omissions, omissions, strict=True):
        assert whole.startswith(begin)
    if made.headings:
        assert tuple(mark.label for mark in store.headings(ref)) == made.headings
