"""The promises that machines keep: floors, sizes, one string per error, types on the doors, cases in every extension."""

import ast
import functools
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from widefield.naming import load, names_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "widefield"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
EXTENSIONS = [
    "widefield.tasks", "widefield.models", "widefield.data.formats", "widefield.launchers", "widefield.parallel.strategies",
    "widefield.cli", "widefield.losses", "widefield.diagnosis.checks", "widefield.diagnosis.rules",
]  # fmt: skip
STORIES = {"run.py": 60}
"""The one function that may be longer than the rest, in lines: the story of a run."""

MAY_SEND = (
    "comm/", "tiled/", "streaming/", "tensor_parallel/", "pipelining/", "parallel/", "verification/", "sharded_state.py",
    "training/checkpoint.py", "private_torch/", "faults/points.py",
)  # fmt: skip
"""Rooms and files that may use torch.distributed."""

OF_SEVERAL = {"SignalException"}
"""Exceptions that are no text alone: torch's takes a message and the signal."""

Check = Callable[[str, str], Iterator[str]]


@functools.cache
def nodes_of(text: str) -> list[ast.AST]:
    """Of a file's syntax tree; kept as long as these tests run."""
    return list(ast.walk(ast.parse(text)))


@pytest.fixture(scope="module", autouse=True)
def forgotten_nodes() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def problems(check: Check) -> list[str]:
    return [f"widefield/{name}, line {problem}" for name, text in SOURCES.items() for problem in check(name, text)]


def tool(name: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a tool that lies beside this Python."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert path is not None, f"{name} is not installed; pip install 'widefield[test]'"
    return subprocess.run([path, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


# ---------------------------------------------------------------------------------------------- the checks


def torch_distributed(name: str, text: str) -> Iterator[str]:
    """Uses of torch.distributed where they have no place."""
    if name.startswith(MAY_SEND):
        return
    for node in nodes_of(text):
        for module in _modules(node):
            if f"{module}.".startswith("torch.distributed."):
                yield f"{node.lineno}: {module}"


def _modules(node: ast.AST) -> list[str]:
    """The modules that a statement imports or an expression names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" else []


def strings_apart(name: str, text: str) -> Iterator[str]:
    """Exceptions of several strings: a comma where the text goes on."""
    for node in nodes_of(text):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            args = node.exc.args
            texts = [arg for arg in args if isinstance(arg, ast.JoinedStr | ast.Tuple) or _is_text(arg)]
            alone = len(args) == 1 and not isinstance(args[0], ast.Tuple)
            if texts and not alone and ast.unparse(node.exc.func) not in OF_SEVERAL:
                yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def long_functions(name: str, text: str) -> Iterator[str]:
    most = STORIES.get(name, 40)
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > most:
                yield f"{node.lineno}: {node.name} has {lines} lines, more than {most}"


def long_files(name: str, text: str) -> Iterator[str]:
    if (lines := len(text.splitlines())) > 400:
        yield f"{lines}: the file ends here and not by 400"


def rooms_without_a_noun(name: str, text: str) -> Iterator[str]:
    for part in Path(name).with_suffix("").parts:
        if part in ("utils", "util", "common", "helpers", "misc", "callbacks", "hooks"):
            yield f"1: {part} says nothing of what lives there"


UNPICKLERS = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "torch.jit.load", "torch.hub")
RUNS_TEXT = {
    "eval": (), "exec": (), "__import__": (), "os.system": (), "os.popen": (), "np.load": (),
    "torch.load": ("tensor_files.py",),
    "yaml.load": ("section.py",), "yaml.unsafe_load": (), "yaml.full_load": (),
    "importlib.import_module": ("__init__.py", "naming.py", "own_code.py"),
}  # fmt: skip
"""What can run code that a file names, and the files that may call it: those import names of this package, or of the user's."""


def code_from_files(name: str, text: str) -> Iterator[str]:
    """Ways in which what is read from a file could run; see trust.py."""
    for node in nodes_of(text):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name not in RUNS_TEXT.get(called, (name,)):
            yield f"{node.lineno}: {called}"
        if called == "torch.load" and "weights_only=True" not in ast.unparse(node):
            yield f"{node.lineno}: torch.load without weights_only"
        for module in _modules(node):
            if f"{module}.".startswith(tuple(f"{way}." for way in UNPICKLERS)):
                yield f"{node.lineno}: {module}"


def private_words(sources: dict[str, str]) -> set[str]:
    """Names with an underscore that code takes from elsewhere, as attributes or by text."""
    nodes = (node for text in sources.values() for node in nodes_of(text))
    return {name for node in nodes if (name := _private_attribute(node)) or (name := _private_text(node))}


def own_words(sources: dict[str, str]) -> set[str]:
    """Names with an underscore that this package itself gives to something."""
    own: set[str] = set()
    for node in (node for text in sources.values() for node in nodes_of(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own.update(ast.literal_eval(node.value))
    return own


def _private_attribute(node: ast.AST) -> str | None:
    is_private = isinstance(node, ast.Attribute) and _is_private(node.attr)
    return node.attr if is_private and ast.unparse(node.value) not in ("aten", "_aten", "torch.ops.aten") else None


def _private_text(node: ast.AST) -> str | None:
    return node.value if _is_text(node) and node.value.isidentifier() and _is_private(node.value) else None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


OLD_NAMES = {
    "alike", "is_alike", "alone", "run_alone", "homes", "home", "keep_up", "brought", "on_layout", "recut", "own",
    "laid", "become", "turns", "placed_again", "settle", "settled", "receiver", "draws_of", "room", "lane", "raised",
    "shelf", "stand_ins", "executed", "flow", "lay", "way", "ways", "ways_of", "drafts", "habits", "lives", "ledger",
    "slope", "holding", "holder", "tell", "told", "wholes", "absent", "division", "rehearse", "spare", "ghost", "story",
    "party",
}  # fmt: skip
"""What classes and functions were called before they had the words of the field, see docs/log.md, 2026-11-24."""


def old_names(name: str, text: str) -> Iterator[str]:
    """Classes and functions under names that only we would understand."""
    for node in nodes_of(text):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name.strip("_").lower() in OLD_NAMES:
            yield f"{node.lineno}: {node.name}"


OF_OTHERS = {
    "_exit", "_getframe", "_current_frames", "_lru_cache_wrapper", "_inst", "_fields", "_config",  # Python's
    "_rand", "_bit_generator",  # NumPy's
    "_reductions", "_to_sync", "_update_count",  # torchmetrics'
}  # fmt: skip
"""Names with an underscore of others than torch."""
_ROOM = {name: text for name, text in SOURCES.items() if name.startswith("private_torch/")}
_OTHERS = {name: text for name, text in SOURCES.items() if name not in _ROOM}


@functools.cache
def torchs_words() -> set[str]:
    return private_words(_ROOM)


@functools.cache
def words_of_all() -> set[str]:
    return own_words(_OTHERS)


def private_torch(name: str, text: str) -> Iterator[str]:
    """Underscored parts of torch outside of their room.  Names of aten's operators are none."""
    if name in _ROOM:
        return
    own = words_of_all() | own_words({name: text})
    for node in nodes_of(text):
        for module in _modules(node):
            if module.startswith("torch.") and any(map(_is_private, module.split("."))):
                yield f"{node.lineno}: {module}"
        word, text_of = _private_attribute(node), _private_text(node)
        if word is not None and word not in OF_OTHERS:
            owner = ast.unparse(node.value)
            if owner.startswith("torch") or word not in own or (word in torchs_words() and owner != "self"):
                yield f"{node.lineno}: {owner}.{word}"
        if text_of is not None and text_of in torchs_words():
            yield f"{node.lineno}: {text_of!r}"


PLANTED = {
    "import pickle": code_from_files,
    "from pickle import loads": code_from_files,
    "x = eval('1')": code_from_files,
    "torch.load('x', weights_only=True)": code_from_files,
    "yaml.load('x', Loader=_Loader)": code_from_files,
    "importlib.import_module(name)": code_from_files,
    "import torch.distributed as dist": torch_distributed,
    "from torch import distributed": torch_distributed,
    "from torch.distributed import all_reduce": torch_distributed,
    "import torch.distributed.checkpoint": torch_distributed,
    "import torch\ntorch.distributed.barrier()": torch_distributed,
    "raise ValueError('a', 'b')": strings_apart,
    "raise ValueError(f'{3} of', 'b')": strings_apart,
    "raise ValueError(('a', 'b'))": strings_apart,
    "def long():\n" + "    pass\n" * 40: long_functions,
    "async def long():\n" + "    pass\n" * 40: long_functions,
    "x = 1\n" * 401: long_files,
    "import torch._dynamo": private_torch,
    "from torch._subclasses import fake_tensor": private_torch,
    "from torch.library import _register_effectful_op": private_torch,
    "import torch\ntorch._foreach_norm([])": private_torch,
    "from torch import Tensor\nmake = Tensor._make_wrapper_subclass": private_torch,
    "held = module._parameters": private_torch,
    "seen = tensor._nobody_has_seen_this": private_torch,
    "getattr(model, '_compiled_call_impl', None)": private_torch,
    "class Turns: pass": old_names,
    "def _brought(): pass": old_names,
}
FINE = (
    "import torch\nmodel.eval()\ntorch.save(1, 'x')\nimport torch.nn\nraise ValueError('a' f'{3}')\naten._softmax.default(x)\n"
    "self._mine = 1\nother._mine + os._exit(1)\ndef short():\n" + "    pass\n" * 39
)


@pytest.mark.parametrize("text", PLANTED)
def test_each_check_finds_what_it_is_for(text):
    assert len(list(PLANTED[text]("train/planted.py", text))) == 1
    assert list(PLANTED[text]("train/planted.py", FINE)) == []


# ---------------------------------------------------------------------------------------------- the source


CHECKS = [
    torch_distributed, strings_apart, long_functions, long_files, rooms_without_a_noun, code_from_files, private_torch,
    old_names,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_source_keeps_the_promise(check):
    assert problems(check) == []


def test_no_class_name_occurs_twice():
    """One noun has one meaning."""
    trees = [ast.parse(text) for text in SOURCES.values()]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_no_room_holds_more_than_a_quarter_of_the_lines():
    lines = Counter(dict.fromkeys({name.split("/")[0] for name in SOURCES}, 0))
    for name, text in SOURCES.items():
        lines[name.split("/")[0]] += len(text.splitlines())
    room, most = lines.most_common(1)[0]
    assert most <= lines.total() / 4, f"{room} has {most} of {lines.total()} lines"


def test_every_room_says_what_it_is_for():
    rooms = [name for name in SOURCES if name.endswith("/__init__.py")]
    assert [room for room in rooms if not ast.get_docstring(ast.parse(SOURCES[room]))] == [] and len(rooms) > 15


@pytest.mark.parametrize("package", EXTENSIONS)
def test_every_extension_brings_its_cases(package):
    assert names_in(package), f"{package} offers nothing"
    assert [name for name in names_in(package) if not isinstance(getattr(load(package, name), "CASES", None), list)] == []


# ---------------------------------------------------------------------------------------------- tools


def test_contributing_names_every_room_and_floor():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    floors = [floor for floor in contracts[0]["layers"] if floor not in ("forked_ranks", "__main__")]
    assert " > ".join(floors) in " ".join(text.split())
    rooms = {room for floor in floors for room in floor.split(" | ")}
    names = [f"`{room}/`" if (PACKAGE / room).is_dir() else f"`{room}.py`" for room in sorted(rooms)]
    table = text[text.index("| room | what it does |") : text.index("## Floors")]
    assert [name for name in names if name not in table] == []


def test_the_floors_hold():
    done = tool("lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("planted", "where", "broken"),
    [
        ("", "geometry/interval.py", False),
        ("import widefield.cli", "geometry/interval.py", True),
        ("from widefield import tasks", "comm/mesh.py", True),
        ("from widefield.run import train", "report/page.py", True),
    ],
)
def test_a_planted_upward_import_breaks_the_floors(tmp_path, planted, where, broken):
    shutil.copytree(PACKAGE, tmp_path / "widefield", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "widefield" / where).open("a") as file:
        file.write(f"\n{planted}\n")
    done = tool("lint-imports", "--no-cache", cwd=tmp_path)
    assert (done.returncode != 0) == broken == ("BROKEN" in done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(arguments):
    done = tool("ruff", *arguments, "--no-cache", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_doors_are_typed():
    done = tool("mypy")
    assert done.returncode == 0, done.stdout + done.stderr
