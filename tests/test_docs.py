"""README.md and docs/: everything that they name exists, and everything that users can set is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.evidence import papers
from core.config import RouterPolicy, SchedulingPolicyName
from core.scheduling.ops import BUILT_IN
from entrypoints.openai.fields.fields import EDIT_FIELDS
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


def folders() -> set[str]:
    """Folders of the four packages with modules."""
    paths = (path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {f"{path.relative_to(ROOT)}/" for path in paths}


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


def test_the_architecture_has_a_line_for_every_folder() -> None:
    rows = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith("| `")]
    named = [row.split("`")[1] for row in rows]
    assert sorted({*named}) == sorted(named)
    assert not folders() - {"engine/", *named}  # engine/ has nothing of its own


def test_every_family_is_documented() -> None:
    files = (ROOT / "model_executor" / "models" / "families").glob("*.py")
    families = {
        name for file in files for name in re.findall(r'^    family = "([\w-]+)"', file.read_text(), re.MULTILINE)
    }
    assert {"flux-fill", "dit"} <= families
    page = (ROOT / "docs" / "models.md").read_text()
    assert not [name for name in families if f"| `{name}` |" not in page]


def test_every_policy_is_documented() -> None:
    for page, names in (("scheduling", SchedulingPolicyName), ("routing", RouterPolicy)):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert not [name for name in get_args(names) if f"| `{name}`" not in text]


def test_every_op_is_documented() -> None:
    (row,) = re.findall(
        r"^\| `worker_busy_seconds_total`.*$", (ROOT / "docs/observability.md").read_text(), re.MULTILINE
    )
    assert not [op.name for op in BUILT_IN if f"`{op.cost_name}`" not in row]


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


def test_the_page_of_papers_is_generated() -> None:
    """`python -m benchmarks.evidence.papers` writes it."""
    assert (ROOT / "docs" / "papers.md").read_text() == papers.render(ROOT / "docs")


def test_every_result_is_on_the_page_of_papers() -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    assert not [path.stem for path in (ROOT / "docs" / "results").glob("*.json") if f"| {path.stem} | `" not in text]


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _LINK.findall(text_of(page))
    }
    assert not [page.name for page in PAGES[1:] if page not in linked]


def figures_of(text: str) -> set[str]:
    """Numbers, without the commas of thousands and the digits of names such as `H100`."""
    return set(
        re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w]|\.\d)", re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("x", " "))
    )


def rounds_to(figure: str, exact: str) -> bool:
    digits = len(figure.partition(".")[2])
    return f"{float(exact):.{digits}f}" == figure


FLUX = (
    (ROOT / "docs" / "flux_on_a_gpu.md")
    .read_text()
    .partition("**What to expect.**")[2]
    .partition(" The first\nstart")[0]
)
MEASURED = re.split(r"\n- ", (ROOT / "README.md").read_text().partition("\n## Measured\n")[2].partition("\n## ")[0])[1:]


@pytest.mark.parametrize("claim", [*MEASURED, FLUX.replace("(gpu.md", "(docs/gpu.md")])
def test_figures_are_those_of_the_page_that_it_names(claim: str) -> None:
    claim = claim.partition("\n\n")[0]
    (page,) = set(re.findall(r"\]\((docs/\w+\.md)", claim))
    there = figures_of((ROOT / page).read_text())
    assert not [f for f in figures_of(_LINK.sub("", claim)) if not any(rounds_to(f, exact) for exact in there)]


def test_start_up_and_the_soak_are_measured_on_one_page_each() -> None:
    """Other pages link there, so that no figure is left behind when one is measured again."""
    for sign, source in (
        (r"/ready`?: median", "benchmarks"),
        (r"\d requests, \d+ faults|pictures compared", "reliability"),
    ):
        assert [page.stem for page in PAGES if re.search(sign, page.read_text())] == [source]


HAND_WRITTEN = [
    *(page for page in PAGES if page.stem not in ("benchmarks", "flags", "gpu", "papers")),
    *(ROOT / "benchmarks" / "evidence").glob("*.md"),
    *(ROOT / "benchmarks" / "gpu").glob("*.md"),
    ROOT / "model_executor" / "embedded" / "README.md",
]


def test_what_is_written_by_hand_is_short() -> None:
    """Words have a letter or a digit; those that make a table's borders do not count."""
    words = [word for page in HAND_WRITTEN for word in page.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= 17_000


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1000


def test_the_page_on_scheduling_is_short() -> None:
    assert len((ROOT / "docs" / "scheduling.md").read_text().split()) <= 1800
