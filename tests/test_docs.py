"""README.md and docs/: everything that they name exists, and everything that users can set is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints.openai.fields.fields import EDIT_FIELDS
from entrypoints.serve_flags import FLAGS
from tools.flags_page import PAGE, flags_page

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "engine", "model_executor", "entrypoints")
TREES = (*PACKAGES, "benchmarks", "deploy", "docs", "examples", "tests", "tools")
"""Folders of the repository; a path that begins with one of them must exist."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"

WRITTEN = {"docs/gpu_results"}
"""What commands write; it need not be there."""

OPENAI_FIELDS = frozenset(
    {
        "background",
        "complexity",
        "frame_count",
        "frame_duration_ms",
        "input_fidelity",
        "model",
        "moderation",
        "n",
        "output_compression",
        "output_format",
        "prompt",
        "quality",
        "response_format",
        "safety_identifier",
        "size",
        "user",
    }
)
"""Fields that mean what OpenAI's reference says."""

_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TREES)})/[\w./-]*\w/?")
_MODULE = re.compile(r"python3?\s+(?:-\w\s+)*-m\s+([\w.]+)")
_TARGET = re.compile(r"(?:`|^    |[|;&] )make ([a-z][a-z-]*(?: [a-z][a-z-]*)*)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.name


def text_of(page: Path) -> str:
    """The page's text with joined lines, so that a command over two lines is found."""
    return re.sub(r"\\\n\s*", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def named_files(row: str) -> Iterator[str]:
    """The paths that a table row names. A bare file name is in the folder named before it."""
    folder = ""
    for name in re.findall(r"`([\w./-]+)`", row):
        if name.startswith(TREES) and "/" in name:
            folder = name if name.endswith("/") else name.rpartition("/")[0] + "/"
            yield name
        elif re.fullmatch(r"[\w-]+\.(?:py|c|json|md|js|html|css)", name):
            yield folder + name


def folders() -> list[str]:
    """Folders of the four packages with files that git may track."""
    found = (path for package in PACKAGES for path in (ROOT / package).iterdir() if path.is_dir())
    return sorted(f"{path.parent.name}/{path.name}/" for path in found if path.name != "__pycache__")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page if not file else (page.parent / file).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page: Path) -> None:
    missing = [path for path in _PATH.findall(text_of(page)) if not (ROOT / path).exists()]
    assert not set(missing) - WRITTEN


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_name_modules(page: Path) -> None:
    modules = [name for name in _MODULE.findall(text_of(page)) if name.startswith(tuple(f"{tree}." for tree in TREES))]
    assert not [name for name in modules if not is_module(name)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE) for name in line.split()}
    targets |= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {name for command in _TARGET.findall(text_of(page)) for name in command.split()}
    assert named <= targets


def test_files_of_the_architecture_exist() -> None:
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("|")]
    missing = [name for row in rows for name in named_files(row) if not (ROOT / name).exists()]
    assert not missing


def test_names_in_the_architecture_exist() -> None:
    rows = "".join(line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("|"))
    sources = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = re.findall(r"`(_?[A-Z]\w+|_[a-z]\w+)`", rows)
    assert names
    assert not [name for name in names if not re.search(rf"\b{name}\b", sources)]


def test_the_architecture_names_every_folder() -> None:
    rows = "".join(line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("|"))
    assert not [folder for folder in folders() if f"`{folder}" not in rows]


def test_every_flag_is_documented() -> None:
    section = (ROOT / "docs" / "api.md").read_text().partition("\n## Flags\n")[2]
    assert not [flag.name for flags in FLAGS.values() for flag in flags if f"`{flag.name}`" not in section]


def test_the_page_of_flags_is_that_of_the_table() -> None:
    """`python -m tools.flags_page` writes it."""
    assert PAGE.read_text() == flags_page()


def test_every_added_field_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert not [name for name in EDIT_FIELDS if name not in OPENAI_FIELDS and f"`{name}`" not in text]


def test_the_benchmarks_end_with_what_is_written_by_hand() -> None:
    """`make bench` writes the rest of the page and appends this file."""
    by_hand = (ROOT / "benchmarks" / "evidence" / "measuring.md").read_text()
    assert (ROOT / "docs" / "benchmarks.md").read_text().endswith(by_hand)


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _LINK.findall(text_of(page))
    }
    assert not [page.name for page in PAGES[1:] if page not in linked]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1000
