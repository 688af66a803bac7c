"""README.md and docs/: everything that they name exists, and everything that users can set is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.evidence import papers
from core.config import RouterPolicy, SchedulingPolicyName
from core.scheduling.ops import BUILT_IN
from entrypoints.openai.fields.fields import EDIT_FIELDS
from tools.family_table import BEGIN, END, with_table
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

OTHERS_FLAGS = {"--cpus", "--cpuset-cpus", "--health-cmd", "--help", "--init", "--shm-size", "--stop-timeout"}
"""Of `docker run`, and of every parser."""

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
def test_named_flags_exist(page: Path, sources: str) -> None:
    named = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text())) - OTHERS_FLAGS
    assert not [flag for flag in named if f'"{flag}"' not in sources]


@pytest.fixture(scope="module")
def sources() -> str:
    """The text of all modules in which flags may be."""
    trees = (*PACKAGES, "benchmarks", "tools")
    return "".join(path.read_text() for tree in trees for path in (ROOT / tree).rglob("*.py"))


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


def test_the_table_of_families_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert with_table(page) == page


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


def result(name: str) -> dict[str, Any]:
    """The figures of a file of results."""
    figures: dict[str, Any] = papers.find(name, ROOT / "docs")["figures"]
    return figures


def cells(page: str, heading: str, first: str) -> list[str]:
    """The cells of the one row below a heading of docs/`page`.md that begins with the cell `first`, without it."""
    below = (ROOT / "docs" / f"{page}.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (row,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", below, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def ssim(column: int) -> re.Match[str]:
    """(mean, p10, mean with another seed, ...) of the shipped default. column: 0 silhouettes, 1 boxes."""
    cell = cells("quality", "The shipped default", "SSIM in the box, mean / p10")[column]
    found = re.fullmatch(r"(\S+) / (\S+) \((\S+) / \S+\)", cell)
    assert found is not None, cell
    return found


def measured() -> list[str]:
    """What the README's bullets under "Measured" say, made from the results."""
    serving, h100 = result("serving"), result("nvidia-h100-80gb-hbm3/engine_edits")
    edit = cells("benchmarks", "Single runs", "an edit through HTTP, mask ratio 0.1, warm, 8 and 28 steps")[0]
    outline, box = ssim(0), ssim(1)
    zen3 = (ROOT / "docs" / "benchmarks_zen3.md").read_text()
    factors = re.findall(r"\| Stencil \| [\d.]+ \| ([\d.]+)x|Mean latency ([\d.]+)x lower", zen3)
    return [
        f"{serving['throughput_8']:g} times the throughput of diffusers' `FluxFillPipeline` behind FastAPI, and a "
        f"{serving['mean_gain']:g} times lower mean latency at 0.95 of its capacity, with masks as in a public trace. "
        f"Without AVX-512, on Zen 3, these are {factors[0][0]} and {next(gain for _, gain in factors if gain)}.",
        "With a warm template and a mask ratio of 0.1, "
        f"{edit.partition('x and ')[0]} times faster than the exact edit.",
        f"SSIM inside the mask's box, against the exact edit, {outline[1]} under silhouettes and {box[1]} under boxes; "
        f"an exact edit with another seed has {outline[3]} and {box[3]}.",
        f"An edit at mask ratio {h100['warm_ratio']:g} in {h100['warm_s']:.1f} s, the exact one in "
        f"{h100['exact_s']:.1f} s.",
    ]


def test_measured_figures_are_those_of_the_results() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Measured\n")[2].partition("\n## ")[0]
    bullets = [" ".join(bullet.partition("\n\n")[0].split()) for bullet in section.split("\n- ")[1:]]
    assert [re.sub(r" \(\[.*?\]\(.*?\)\)", "", bullet) for bullet in bullets] == measured()


def test_the_expected_times_of_flux_are_those_of_the_card() -> None:
    h100 = result("nvidia-h100-80gb-hbm3/engine_edits")
    words = (
        f"an exact edit of 1024 px and {h100['steps']} steps took {h100['exact_s']:.1f} s, the first masked edit of a "
        f"picture {h100['cold_s']:.1f} s, later ones {h100['warm_s']:.1f} s at a mask ratio of {h100['warm_ratio']:g}."
    )
    assert words in " ".join((ROOT / "docs" / "flux_on_a_gpu.md").read_text().split())


def test_start_up_and_the_soak_are_measured_on_one_page_each() -> None:
    """Other pages link there, so that no figure is left behind when one is measured again."""
    for sign, source in (
        (r"/ready`?: median", "benchmarks"),
        (r"\d requests, \d+ faults|pictures compared", "reliability"),
    ):
        assert [page.stem for page in PAGES if re.search(sign, page.read_text())] == [source]


HAND_WRITTEN = [
    *(page for page in PAGES if page.stem not in ("benchmarks", "benchmarks_zen3", "flags", "gpu", "papers")),
    *(ROOT / "benchmarks" / "evidence").glob("*.md"),
    *(ROOT / "benchmarks" / "gpu").glob("*.md"),
    *(ROOT / "model_executor").glob("embedded*/README.md"),
]


def test_what_is_written_by_hand_is_short() -> None:
    """Words have a letter or a digit; those that make a table's borders do not count."""
    texts = [re.sub(f"{BEGIN}.*{END}", "", page.read_text(), flags=re.DOTALL) for page in HAND_WRITTEN]
    words = [word for text in texts for word in text.split() if any(map(str.isalnum, word))]
    assert len(words) <= 18_200


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1000


def test_the_page_on_scheduling_is_short() -> None:
    assert len((ROOT / "docs" / "scheduling.md").read_text().split()) <= 1800
