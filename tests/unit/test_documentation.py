"""The documentation: links have targets, commands exist, and the README is short."""

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
RESULT_PAGES = sorted(f"results/{page.name}" for page in ROOT.glob("docs/results/*.md") if page.name != "index.md")


def get_page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_prose(page: Path) -> str:
    return re.sub(r"(?s)```.*?```", "", page.read_text("utf-8"))


def find_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=get_page_name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in find_anchors(file), target


def test_the_readme_is_short_and_links_to_all_pages() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 120
    page_names = {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"}
    assert not {name for name in page_names if f"](docs/{name}" not in readme}


def test_pages_for_users_are_short() -> None:
    """Pages of results are not counted, nor is the page of commands, which is generated."""
    pages = {page.name: page.read_text("utf-8") for page in ROOT.glob("docs/*.md") if page.name != "commands.md"}
    assert {name: len(text.splitlines()) for name, text in pages.items() if len(text.splitlines()) > 150} == {}
    assert sum(len(text.split()) for text in pages.values()) <= 15_000


def test_the_index_of_results_links_to_all_results() -> None:
    index = (ROOT / "docs/results/index.md").read_text("utf-8")
    assert not {name for name in RESULT_PAGES if f"]({Path(name).name})" not in index}


# The site


def test_the_navigation_of_the_site_has_every_page() -> None:
    class Loader(yaml.SafeLoader):
        """Ignores the tags of mkdocs.yml that name Python functions."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda *_: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)  # a SafeLoader

    def collect_pages(entry: Any) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        return set().union(*map(collect_pages, entry.values() if isinstance(entry, dict) else entry))

    nav_entries = collect_pages(site["nav"])
    user_pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - set(RESULT_PAGES)
    assert user_pages <= nav_entries
    repository_pages = {name.removeprefix("repository/") for name in nav_entries if name.startswith("repository/")}
    assert all((ROOT / name).is_file() for name in repository_pages)
    assert {page.name for page in ROOT.glob("*.md")} - {"README.md"} <= repository_pages
    assert site["strict"] is True and site["theme"]["font"] is False


@pytest.mark.parametrize(
    "package", [memagent_graph, langchain_memagent, memagent_mcp], ids=lambda module: module.__name__
)
def test_the_reference_has_every_public_name(package: Any) -> None:
    page = (ROOT / f"docs/reference/{package.__name__}.md").read_text("utf-8")
    names = {line.rpartition(".")[2] for line in re.findall(r"(?m)^::: (\S+)$", page)}
    assert names == set(package.__all__) - {"__version__"}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/reference/*.md")), ids=get_page_name)
def test_every_name_in_the_reference_exists(page: Path) -> None:
    for path in re.findall(r"(?m)^::: (\S+)$", page.read_text("utf-8")):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("page", PAGES, ids=get_page_name)
def test_source_files_that_a_page_includes_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert all((ROOT / path).is_file() for path in re.findall(r'(?m)^--8<-- "(.+)"$', text))
    # A code formatter can put a space into this marker; the page would then show the line instead of the source.
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


def find_commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `memagent` command in the page's code."""
    code = re.findall(r"(?s)```sh\n(.*?)```", page.read_text("utf-8")) + re.findall(
        r"`(memagent [^`]+)`", read_prose(page)
    )
    lines = [line for block in code for line in block.replace("\\\n", " ").splitlines()]
    command_words = [shlex.split(re.sub(r"\[OPTIONS\]|\$\((.*?)\)", "", line), comments=True) for line in lines]
    return [line[line.index("memagent") + 1 :] for line in command_words if "memagent" in line]


@pytest.mark.parametrize("page", PAGES, ids=get_page_name)
def test_every_command_in_the_pages_exists_with_its_options(page: Path) -> None:
    for words in find_commands(page):
        if not words or words[0].startswith("-") or words[0] == "COMMAND":
            continue
        name = " ".join(words[:2]) if words[0] == "policy" else words[0]
        assert name in COMMANDS, words
        context = COMMANDS[name].make_context(name, [], resilient_parsing=True)
        known_options = {
            option for param in COMMANDS[name].get_params(context) for option in (*param.opts, *param.secondary_opts)
        }
        assert not {word for word in words if re.match(r"--?[a-z]", word)} - known_options, words


# Errors


def test_every_exit_code_is_in_the_page_of_errors() -> None:
    page = (ROOT / "docs/errors.md").read_text("utf-8")
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)} == {code.value for code in ExitCode}


def test_every_message_in_the_page_of_errors_is_in_the_source() -> None:
    source = "\n".join(
        path.read_text("utf-8") for root in ("memagent_graph", "integrations") for path in (ROOT / root).rglob("*.py")
    )
    page = (ROOT / "docs/errors.md").read_text("utf-8").partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"(?m)^\| `(.+?)` \|", page)
    assert len(messages) > 10
    for message in messages:
        fragments = [text.strip() for text in message.replace("(401)", "...").split("...") if text.strip(" :")]
        assert fragments and all(fragment in source for fragment in fragments), message
