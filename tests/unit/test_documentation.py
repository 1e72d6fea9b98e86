"""The documents for people: links lead somewhere, commands exist, and the first page is short."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import write_command_reference as reference
import write_tables
import yaml

import langchain_memagent
import memagent_graph
import memagent_mcp
from memagent_graph.cli.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("memagent_graph/*/CARD.md")])
COMMANDS = dict(reference.list_commands())
RESULTS = sorted(f"results/{page.name}" for page in ROOT.glob("docs/results/*.md") if page.name != "index.md")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return re.sub(r"(?s)```.*?```", "", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_first_page_is_short_and_leads_to_all_others() -> None:
    first = (ROOT / "README.md").read_text("utf-8")
    assert len(first.splitlines()) <= 120
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"}
    assert not {name for name in pages if f"](docs/{name}" not in first}


def test_pages_for_users_are_short() -> None:
    """Results have pages of their own, and the commands' page is written from the command line."""
    pages = {page.name: page.read_text("utf-8") for page in ROOT.glob("docs/*.md") if page.name != "commands.md"}
    assert {name: len(text.splitlines()) for name, text in pages.items() if len(text.splitlines()) > 150} == {}
    assert sum(len(text.split()) for text in pages.values()) <= 15_000


def test_the_page_of_results_leads_to_all_results() -> None:
    index = (ROOT / "docs/results/index.md").read_text("utf-8")
    assert not {name for name in RESULTS if f"]({Path(name).name})" not in index}


# The site


def test_the_site_s_navigation_has_every_page() -> None:
    class Loader(yaml.SafeLoader):
        """Of mkdocs.yml, whose own tags name functions that the site's environment has."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda *_: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)  # a SafeLoader

    def pages(entry: Any) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        return set().union(*map(pages, entry.values() if isinstance(entry, dict) else entry))

    entries = pages(site["nav"])
    pages_of_users = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - set(RESULTS)
    assert pages_of_users <= entries
    elsewhere = {name.removeprefix("repository/") for name in entries if name.startswith("repository/")}
    assert all((ROOT / name).is_file() for name in elsewhere)
    assert {page.name for page in ROOT.glob("*.md")} - {"README.md"} <= elsewhere
    assert site["strict"] is True and site["theme"]["font"] is False


@pytest.mark.parametrize(
    "package", [memagent_graph, langchain_memagent, memagent_mcp], ids=lambda module: module.__name__
)
def test_the_reference_has_every_public_name(package: Any) -> None:
    page = (ROOT / f"docs/reference/{package.__name__}.md").read_text("utf-8")
    names = {line.rpartition(".")[2] for line in re.findall(r"(?m)^::: (\S+)$", page)}
    assert names == set(package.__all__) - {"__version__"}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/reference/*.md")), ids=name_of)
def test_the_reference_names_what_is_there(page: Path) -> None:
    for path in re.findall(r"(?m)^::: (\S+)$", page.read_text("utf-8")):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_source_that_a_page_shows_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    assert all((ROOT / path).is_file() for path in re.findall(r'(?m)^--8<-- "(.+)"$', text))
    # A formatter of the code in pages would change this line, and the page would show it instead of the source.
    assert len(re.findall(r"(?m)^--8 ?<", text)) == len(re.findall(r'(?m)^--8<-- "', text))


# Commands


def test_the_command_reference_is_up_to_date() -> None:
    assert reference.PAGE.read_text("utf-8") == reference.render_page(), "run python scripts/write_command_reference.py"


def test_the_page_of_tables_is_up_to_date() -> None:
    assert (write_tables.REFERENCE / "tables.md").read_text("utf-8") == write_tables.render_tables_page(), (
        "run python scripts/write_tables.py"
    )


def test_the_help_of_every_command_ends_with_examples() -> None:
    assert not [name for name, command in COMMANDS.items() if "memagent " + name not in (command.epilog or "")]


def typed_in(page: Path) -> list[list[str]]:
    """The words of every `memagent` command in the page's code."""
    code = re.findall(r"(?s)```sh\n(.*?)```", page.read_text("utf-8")) + re.findall(
        r"`(memagent [^`]+)`", text_of(page)
    )
    lines = [line for block in code for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(re.sub(r"\[OPTIONS\]|\$\((.*?)\)", "", line), comments=True) for line in lines]
    return [line[line.index("memagent") + 1 :] for line in words if "memagent" in line]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_in_the_pages_exists_with_its_options(page: Path) -> None:
    for words in typed_in(page):
        if not words or words[0].startswith("-") or words[0] == "COMMAND":
            continue
        name = " ".join(words[:2]) if words[0] == "policy" else words[0]
        assert name in COMMANDS, words
        context = COMMANDS[name].make_context(name, [], resilient_parsing=True)
        known = {
            option for param in COMMANDS[name].get_params(context) for option in (*param.opts, *param.secondary_opts)
        }
        assert not {word for word in words if re.match(r"--?[a-z]", word)} - known, words


# Errors


def test_every_exit_code_is_in_the_page_of_errors() -> None:
    page = (ROOT / "docs/errors.md").read_text("utf-8")
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)} == {code.value for code in ExitCode}


def test_the_messages_in_the_page_of_errors_are_those_of_the_package() -> None:
    source = "\n".join(
        path.read_text("utf-8") for room in ("memagent_graph", "integrations") for path in (ROOT / room).rglob("*.py")
    )
    page = (ROOT / "docs/errors.md").read_text("utf-8").partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"(?m)^\| `(.+?)` \|", page)
    assert len(messages) > 10
    for message in messages:
        parts = [part.strip() for part in message.replace("(401)", "...").split("...") if part.strip(" :")]
        assert parts and all(part in source for part in parts), message
