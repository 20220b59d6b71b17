"""The rules that code of this repository keeps, as functions from a module's syntax tree to what breaks them.

Each yields `line: what is wrong`. `tests/unit/test_tree.py` says which files must keep which.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

Rule: TypeAlias = Callable[[ast.Module], Iterator[str]]

#: The four folders at the top, which are packages of `keyfold`.
FOLDERS = ("statestore", "checkpoints", "sink", "streaming")
#: The floors of the house, from the bottom up. A room is a package, or a module that stands alone; it imports
#: itself and what is on the floors below, nothing beside it and nothing above.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("statestore",),
    ("statestore.keys", "statestore.segment", "statestore.schema"),
    ("statestore.kv", "checkpoints.compaction", "checkpoints.manifest"),
    ("statestore.rocksdb", "checkpoints.log"),
    ("checkpoints.lastvalues", "checkpoints.cleaner", "checkpoints.snapshot"),
    ("checkpoints.verify", "checkpoints.anchors", "checkpoints.rollback", "checkpoints.restore"),
    ("checkpoints.transaction",),
    ("checkpoints.engine",),
    ("checkpoints.changelog",),
    ("checkpoints.resume", "checkpoints.standby", "checkpoints.cli", "sink"),
    ("streaming",),
)
FOLDERS_WITH_SPARK = ("sink", "streaming")
#: The only room above the log that knows its writer.
ENGINE = "checkpoints.engine"
FUNCTION_LINES_MAX = 70


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What may be used of `os`: nothing here reads or changes a file or directory.
OS_ALLOWED = _words("""
    environ getenv getpid getppid getuid geteuid uname cpu_count sched_getaffinity urandom kill
    sep linesep devnull fspath fsdecode fsencode PathLike get_terminal_size register_at_fork strerror sysconf
    _exit
    path.abspath path.realpath path.join path.basename path.dirname path.normpath path.expanduser
""")
FILE_MODULES = _words("shutil fcntl mmap tempfile glob fileinput fsspec zipfile")
FILE_FORMATS = _words("pyarrow.fs pyarrow.parquet pyarrow.dataset pyarrow.csv pyarrow.feather")
FILE_CALLS = _words("""
    open io.open pa.OSFile pa.memory_map pa.create_memory_map pa.input_stream pa.output_stream
    np.load np.save np.savez np.fromfile np.memmap np.loadtxt np.savetxt
""")
#: Methods of `pathlib.Path` (and numpy) whose names nothing else has.
PATH_METHODS = _words("""
    read_bytes read_text write_bytes write_text iterdir rglob rmdir touch symlink_to hardlink_to
    is_file is_dir is_symlink lstat samefile lchmod chmod tofile
""")
#: Methods that `Path` shares with `Files` and others: allowed only on an object named as in `RECEIVERS`.
SHARED_METHODS = _words("exists unlink rename stat mkdir glob")
RECEIVERS = _words("files _files LOCAL F")  # F: the functions of Spark's SQL

#: Modules and built-in functions that run what they read.
CODE_MODULES = _words("pickle cloudpickle dill marshal shelve _pickle")
CODE_CALLS = _words("eval exec compile __import__")


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file; relative ones begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + f"{node.module or ''}.{alias.name}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of names and attributes; what is neither counts as an empty name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


#: What a native writer of English would not write here. "Behind" is for lag: a standby is behind its writer.
_UNIDIOMATIC: Final = re.compile(
    r"\b(anew|besides|whoever|so many|there is no such|behind (the|a|an|it|them|this|that|each|every))\b",
    re.IGNORECASE,
)


def unidiomatic(text: str) -> Iterator[str]:
    """Words in strings, docstrings and comments of Python source that give a translation away."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # From Python 3.12 on, an f-string is several tokens, all with STRING in their names.
        if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:
            for found in _UNIDIOMATIC.finditer(" ".join(token.string.split())):
                yield f"{token.start[0]}: {found[0]!r}"


def room_of(module: str) -> str:
    """The room of a module, named without `keyfold`: `checkpoints.log` of `checkpoints.log.writer`."""
    rooms = [room for floor in FLOORS for room in floor if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default="")


def wrong_directions(tree: ast.Module, room: str) -> Iterator[str]:
    """Imports of a room that is not below `room`, imports that hide their room, pyspark where it may not be.

    An import of pyspark for type checkers only is let pass: it never runs.
    """
    (height,) = (n for n, floor in enumerate(FLOORS) if room in floor)
    allowed = {room, *(below for floor in FLOORS[:height] for below in floor)}
    for_types = {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test).removeprefix("typing.") == "TYPE_CHECKING"
        for inner in node.body
    }
    for line, name in imports_of(tree):
        first, _, rest = name.partition(".")
        if name.startswith(".."):
            yield f"{line}: relative import '{name}' leaves the package"
        if first == "keyfold" and rest != "__version__" and room_of(rest) not in allowed:
            yield f"{line}: {room} imports {name}"
        if first not in ("pyspark", "pyspark_keyfold", "py4j") or room in FOLDERS_WITH_SPARK:
            continue
        if line not in for_types:
            yield f"{line}: {room} imports {name}"


def bare_imports(tree: ast.Module) -> Iterator[str]:
    for line, name in imports_of(tree):
        if name.split(".")[0] in FOLDERS:
            yield f"{line}: import of '{name}' makes a second copy of every class: write keyfold.{name}"


def touched_files(tree: ast.Module) -> Iterator[str]:
    """Uses of the file system that do not go through `Files`."""
    for line, name in imports_of(tree):
        first, _, rest = name.partition(".")
        if first in FILE_MODULES or name in FILE_FORMATS or (first == "os" and rest not in ("", "path")):
            yield f"{line}: import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module, _, name = dotted(node).partition(".")
            if module == "os" and name != "path" and not {name, name.partition(".")[0]} & OS_ALLOWED:
                yield f"{node.lineno}: use of os.{name}"
        elif isinstance(node, ast.Call):
            receiver, _, method = dotted(node.func).rpartition(".")
            shared = method in SHARED_METHODS and receiver.rpartition(".")[2] not in RECEIVERS
            if dotted(node.func) in FILE_CALLS or (_is_method(node) and (method in PATH_METHODS or shared)):
                yield f"{node.lineno}: call of {dotted(node.func)}"


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute)


def code_from_data(tree: ast.Module) -> Iterator[str]:
    """Whatever runs code that was read as data, RocksDB's default mode included, which unpickles values."""
    from_rocksdict = set()
    for line, name in imports_of(tree):
        if set(name.split(".")) & CODE_MODULES:
            yield f"{line}: import of {name}"
        if name.startswith("rocksdict."):
            from_rocksdict.add(name.removeprefix("rocksdict."))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {k.arg: k.value for k in node.keywords}
        if name in CODE_CALLS or keywords.get("allow_pickle"):
            yield f"{node.lineno}: call of {name}"
        if name not in from_rocksdict and not name.startswith("rocksdict."):
            continue
        name = name.removeprefix("rocksdict.")
        if name == "Options":
            raw = keywords.get("raw_mode")
            if not (isinstance(raw, ast.Constant) and raw.value is True):
                yield f"{node.lineno}: Options without raw_mode=True"
        if name == "Rdict" and "options" not in keywords and len(node.args) < 2:
            yield f"{node.lineno}: Rdict without options"


#: The errors that users see.
_ERRORS = _words("""
    ConfigError WrongType NotAChangelog UnsupportedFormat Damaged StorageFailed ChangelogLocked
    WriterFenced BadRecord SchemaMismatch BatchConflict CompactedAway ViewExpired NotResumable
""")


def helpless_errors(tree: ast.Module) -> Iterator[str]:
    """Errors that do not say what the user can do. (`**` may hold it.)"""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] not in _ERRORS:
            continue
        if not {k.arg for k in node.keywords} & {"remedy", None}:
            yield f"{node.lineno}: {dotted(node.func)} without remedy"


def reaches_through_the_door(tree: ast.Module) -> Iterator[str]:
    """Uses of the engine's writer: what is above the engine commits by `Engine.commit`, which takes the turn
    and asks whether the batch is new, and uses the engine's own methods for the rest.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "writer":
            yield f"{node.lineno}: use of {dotted(node)}"


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {lines} lines"
