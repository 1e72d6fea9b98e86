"""Documents of every kind: the fact that is easily lost is in the text, and what is lost is told."""

from __future__ import annotations

import pytest
from support.document_files import convert_in_this_process
from support.made_documents import Made, made_documents

from memagent_graph.documents import Document, DocumentStore, loaders
from memagent_graph.errors import DocumentError


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(loaders, "convert_parts", convert_in_this_process)
    return DocumentStore(tmp_path)


@pytest.mark.parametrize("made", made_documents(), ids=lambda made: made.name)
def test_a_documents_fact_is_in_its_text_and_its_losses_are_told(made: Made, store):
    document = Document.from_bytes(made.data, name=made.name)
    if made.error:
        with pytest.raises(DocumentError, match=made.error.replace("(", r"\(").replace(")", r"\)")):
            store.add(document)
        return
    ref = store.add(document)
    text = store.read(ref, 0, ref["size"])
    assert [fact for fact in made.facts if fact not in text] == [], text
    assert [lost for lost in made.lost if lost in text] == [], text
    omissions = [
        f"{part['count']} {part['what']}" + (f" ({part['places']})" if part["places"] else "")
        for part in ref.get("omissions", ())
    ]
    assert len(omissions) == len(made.omissions), omissions
    assert [begin for begin, whole in zip(made.omissions, omissions, strict=True) if not whole.startswith(begin)] == []
    if made.headings:
        assert tuple(mark.label for mark in store.headings(ref)) == made.headings
