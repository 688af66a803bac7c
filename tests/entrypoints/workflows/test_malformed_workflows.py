"""Files of workflows with mistakes in them: each gives one WorkflowError that says where it is, or is sound."""

from __future__ import annotations

import ast
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from core.errors import WorkflowError
from core.graph.catalog import with_registered
from entrypoints.workflows.import_limits import ImportLimits
from entrypoints.workflows.import_messages import ImportOrder
from entrypoints.workflows.importer import import_text
from entrypoints.workflows.registered import Registered

PACKAGE = Path(__file__).resolve().parents[3] / "entrypoints" / "workflows"
FILES = 600

HEAD = """
from entrypoints.workflows import Image, Model, Workflow, choose, picture, steps, tensor, text

class Blur(Model):
    def setup_io(self):
        self.add_input("image", Image)
        self.add_input("radius", float, required=False)
        self.add_output("image", Image)

    def load(self, device, dtype):
        pass

    def execute(self, image, radius=1.0):
        return {"image": image}

class Judge(Model):
    def setup_io(self):
        self.add_input("image", Image)
        self.add_output("verdict", text(8))
        self.add_output("score", float)

    def load(self, device, dtype):
        pass

    def execute(self, image):
        return {"verdict": "fine", "score": 1.0}

blur, judge = Blur(), Judge(level=3)
workflow = Workflow(name="made")
image = workflow.add_input("image", Image)
"""

BODY = """
n = workflow.add_input("n", int)
soft = blur(image, radius=2.0)
verdict, score = judge(soft)
for step in steps(n):
    soft = blur(image=soft, radius=score)
result = choose(verdict, fine=lambda: soft, coarse=lambda: blur(blur(image)))
workflow.add_output(result, name="picture")
workflow.add_output(score, name="score")
"""

TAIL = "workflow.add_output(blur(image), name='picture')\n"

LEFT = "for step in steps(2):\n    image = blur(image)\n    break"
BARE = ("", "workflow = 3", "other = Workflow(name='made')", LEFT)
"""What needs no result to be wrong."""


def imported(source: str) -> Registered:
    registered = import_text(ImportOrder("made", "made.py", source, ImportLimits()))
    with_registered(registered.workflows, {each.name for each in registered.classes})
    return registered


def test_the_file_without_mistakes_is_sound() -> None:
    assert [workflow.name for workflow in imported(HEAD + BODY).workflows] == ["made"]


@pytest.mark.parametrize(
    ("body", "node", "input", "problem"),
    [
        ("", "", "", "workflow made has no output"),
        ("workflow = 3", "", "", "it has no workflow; let a variable of the module be"),
        ("other = Workflow(name='made')", "", "", "workflow made: two have this name"),
        ("Workflow(name='a b')", "", "", "workflow 'a b': a name has 1 to 64 letters"),
        ("blur()", "blur", "image", "it is not given"),
        ("blur(image, 1.0, 2)", "Blur", "", "it gets 3 values, and has 2 inputs"),
        ("blur(image, image=image)", "Blur", "image", "it is given twice"),
        ("blur(image, sigma=2.0)", "blur", "sigma", "it has no such input; there are image, radius"),
        ("blur(image, radius=[1])", "blur", "radius", "it is a list; give a value, bool"),
        ("blur('words')", "blur", "image", "its literal: it is a str, and picture"),
        ("blur(image, radius='much')", "blur", "radius", "its literal: it is a str, and number is declared"),
        ("blur(judge(image).score)", "blur", "image", "it takes picture, and judge.score is number"),
        ("blur(workflow.add_input('big', picture(4000, 10)))", "blur", "image", "it takes picture of up to 2048"),
        ("workflow.add_input('image', Image)", "", "", "input 'image': an input has a name of its own"),
        ("workflow.add_input('a', dict)", "workflow made", "a", "says no size; give bool, int, float, str, Image"),
        ("workflow.add_input('a', tensor('int7', 3))", "", "a", "there is no dtype int7"),
        (
            "workflow.add_input('a', picture(9 / 2, 8))",
            "workflow made",
            "a",
            "its sides are [4.5, 8, 3]; give whole numbers",
        ),
        ("workflow.add_input('a', text('8'))", "workflow made", "a", "its sides are ['8']; give whole numbers"),
        ("workflow.add_input('a', tensor(bool, 3))", "workflow made", "a", "its dtype is <class 'bool'>; give a name"),
        ("workflow.add_output(image, name='not one')", "", "", "output 'not one': an output has a name of its own"),
        ("workflow.add_output('x', name='x')", "", "x", "x is no value of this workflow"),
        ("if image: pass", "", "image", "known only while a request runs; choose"),
        ("if judge(image).verdict == 'fine': pass", "judge", "", "a Model compares it, and choose"),
        ("for i in range(workflow.add_input('n', int)): pass", "", "n", "steps(...) makes a loop"),
        ("for step in steps(0): pass", "", "", "steps(0): 1 to 200, or an input"),
        ("for step in steps(judge(image).score): pass", "", "", "steps(judge.score): a number, or an int"),
        (LEFT, "", "", "a loop was left before its end"),
        ("for step in steps(2):\n for other in steps(2): pass", "", "", "a loop cannot be in a loop"),
        ("for step in steps(2): blur(image)", "blur", "", "region loop carries nothing"),
        (
            "many = []\nfor step in steps(2):\n many.append(step)\n image = blur(image, radius=len(many))",
            "blur",
            "radius",
            "it is 1 in the first round and 2",
        ),
        (
            "for step in steps(2):\n made = (blur if blur.settings else judge)(image)\n blur.settings['a'] = 1",
            "judge",
            "",
            "the second round has Blur in its place",
        ),
        (
            "x = 1\nfor step in steps(2):\n image = blur(image)\n x = x * 2",
            "",
            "x",
            "two rounds leave different things",
        ),
        (
            "kept = []\nfor step in steps(2):\n image = blur(image)\n kept.append(image)\nblur(kept[0])",
            "blur_2",
            "image",
            "is of a loop's first round",
        ),
        (
            "kept = (image, image)\nfor step in steps(2):\n kept = (kept[1], blur(kept[1]))",
            "",
            "kept",
            "two rounds leave different things",
        ),
        ("for step in steps(2): workflow.add_output(blur(image), name='x')", "", "", "add it after the loop"),
        ("choose(judge(image).score, a=lambda: image, b=lambda: image)", "choice", "verdict", "what chooses is a text"),
        ("choose(judge(image).verdict, a=lambda: image)", "choice", "", "two branches or more"),
        ("choose(judge(image).verdict, a=lambda: image, b=lambda: 3)", "choice", "b", "returns one value"),
        ("choose(judge(image).verdict, a=lambda: image, b=lambda: judge(image).score)", "choice", "", "make different"),
        (
            "kept = []\ndef keep(): kept.append(blur(image)); return kept[0]\n"
            "choose(judge(image).verdict, a=keep, b=lambda: image)\nblur(kept[0])",
            "blur_2",
            "image",
            "is made in branch a, and read outside",
        ),
        (
            "class Gray(Blur):\n def setup_io(self): self.add_output('image', Image)\n"
            "choose(judge(image).verdict, a=lambda: Gray()(), b=lambda: image)",
            "choice",
            "a",
            "the branch reads nothing",
        ),
        ("class Mute(Blur):\n def setup_io(self): pass\nMute()()", "mute", "", "it has no outputs; add_output"),
        (
            "class Odd(Blur):\n def setup_io(self): self.add_output('class', Image)\nOdd()",
            "Odd",
            "",
            "a Python identifier",
        ),
        ("class Odd(Blur):\n def setup_io(self): self.add_output('y', object)\nOdd()", "Odd", "y", "says no size"),
        ("class Slow(Blur):\n seconds = -1.0\nSlow()(image)", "slow", "", "class Slow: Invalid 'seconds'"),
        ("class Set(Blur):\n pass\nSet(words=[1])(image)", "set", "", "class Set: Invalid type for 'settings'"),
        (
            "def make():\n class Inner(Blur): pass\n return Inner()\nmake()(image)",
            "inner",
            "",
            "workers cannot import make.<locals>.Inner",
        ),
        ("blur.add_patch(judge)\nblur(image)", "blur", "", "takes no patches"),
        ("for i in range(1001): blur(image)", "blur_1001", "", "a workflow has at most 1000 nodes"),
    ],
)
def test_an_error_names_node_and_input(body: str, node: str, input: str, problem: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        imported(f"{HEAD}\n{body}\n{'' if body in BARE else TAIL}")
    assert problem in str(caught.value)
    assert (caught.value.node, caught.value.input) == (node, input)


def test_patches_are_removed_by_name_of_the_object() -> None:
    body = "blur.add_patch(judge)\nblur.rm_patch(judge)\nworkflow.add_output(blur(image), name='y')"
    assert len(imported(HEAD + body).workflows[0].nodes) == 1


NAMES = ("image", "soft", "verdict", "score", "blur", "judge", "workflow", "None", "-1")


class Mistakes(ast.NodeTransformer):
    """Puts other names and numbers in some places."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and self._random.random() < 0.02:
            return ast.parse(self._random.choice(NAMES), mode="eval").body
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if self._random.random() < 0.02:
            return ast.Constant(self._random.choice([0, -1.5, "", "image", True, None, "x" * 70, 10**30]))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if node.args and self._random.random() < 0.02:
            node.args.pop()
        if node.keywords and self._random.random() < 0.02:
            node.keywords.append(
                node.keywords[-1] if self._random.random() < 0.1 else ast.keyword("radius", node.keywords[0].value)
            )
        return node


def malformed(random: Random) -> str:
    """The file with mistakes: other names and numbers, lines that lack, come twice or in another order."""
    tree = Mistakes(random).visit(ast.parse(HEAD + BODY))
    lines = tree.body
    for _ in range(random.choice([0, 0, 1])):
        place, other = random.randrange(6, len(lines)), random.randrange(6, len(lines))
        match random.randrange(3):
            case 0:
                del lines[place]
            case 1:
                lines.insert(other, lines[place])
            case 2:
                lines[place], lines[other] = lines[other], lines[place]
    return ast.unparse(ast.fix_missing_locations(tree))


def test_what_is_wrong_with_a_file_is_a_workflow_error_or_the_files_own() -> None:
    """No mistake makes the language itself fail: what its code raises is a WorkflowError, or names a wrong call."""
    random, ends = Random(4), Counter[str]()
    for _ in range(FILES):
        source = malformed(random)
        try:
            imported(source)
        except WorkflowError:
            ends["refused"] += 1
        except Exception as error:  # of the file itself
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            is_ours = PACKAGE in Path(innermost.filename).parents and innermost.name != "import_text"
            assert not is_ours, f"{source}\n{traceback.format_exc()}"
            ends["raised"] += 1
        else:
            ends["sound"] += 1
    assert min(ends.values()) > FILES / 10, ends
