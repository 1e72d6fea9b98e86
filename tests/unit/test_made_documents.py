"""Documents of every kind: the fact that is easily lost is in the text, and what is lost is told."""

from __future__ import annotations

import io

import pytest
from support.made_documents import Made, made_documents

from memagent_graph.converters import ConversionError, SourceFile
from memagent_graph.documents import Document, DocumentStore, loaders
from memagent_graph.documents.conversion import converter_kinds
from memagent_graph.documents.conversion_program import convert_file
from memagent_graph.errors import DocumentError


def in_this_process(name, kind, file, cancellation, *, pages="", converter=None):
    """What `conversion.convert_parts` does, without its process."""
    file.seek(0)
    places = {kind: place for kind, (place, _) in converter_kinds().items()}
    return convert_file(SourceFile(name, kind, io.BytesIO(file.read()), pages, places), None)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(loaders, "convert_parts", in_this_process)
    return DocumentStore(tmp_path)


@pytest.mark.parametrize("made", made_documents(), ids=lambda made: made.name)
def test_a_documents_fact_is_in_its_text_and_its_losses_are_told(made: Made, store):
    document = Document.from_bytes(made.data, name=made.name)
    if made.error:
        with pytest.raises((DocumentError, ConversionError), match=made.error.replace("(", r"\(").replace(")", r"\)")):
            store.add(document)
        return
    ref = store.add(document)
    text = store.read(ref, 0, ref["size"])
    assert [fact for fact in made.facts if fact not in text] == [], text
    assert [lost for lost in made.lost if lost in text] == [], text
    told = [
        f"{each['count']} {each['what']}" + (f" ({each['places']})" if each["places"] else "")
        for each in ref.get("omissions", ())
    ]
    assert len(told) == len(made.omissions), told
    assert [begin for begin, whole in zip(made.omissions, told, strict=True) if not whole.startswith(begin)] == [], told
    if made.headings:
        assert tuple(mark.label for mark in store.headings(ref)) == made.headings
