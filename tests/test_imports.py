"""Imports go one way, pure modules stay light, and only public, declared interfaces are used.

Idea: the imports are read from the syntax tree, those inside functions and type-checking blocks included,
so that nothing has to run for an upward import to be seen. What a module costs to import, and whether it
needs jax, is found by importing it in a fresh interpreter in which jax cannot be imported.

Data flow: source files → `IMPORTS` (module → imported names) → one law a test.

Worked example: `from checkpoints.state import CheckpointState` in layers/params.py would make the import
`checkpoints.state.CheckpointState` of the module `layers.params`, two ranks upward.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
# Each may import itself and what stands before it.
ORDER = ("layers", "checkpoints", "inference_engine", "configs", "run_serving")
# Development folders: they may import every package, and no package may import them.
OUTSIDE = ("benchmarks", "tests", "training")

# Modules that decide and do not compute: they import without jax.
PURE = (
    "configs.engines",
    "configs.models",
    "configs.prompts",
    "configs.sweeps",
    "inference_engine.cli.main",
    "inference_engine.detokenizer",
    "inference_engine.profiling.chips",
    "inference_engine.profiling.rows",
    "inference_engine.profiling.spread",
    "inference_engine.profiling.store",
    "inference_engine.sampling_params",
    "inference_engine.score_windows",
    "inference_engine.sharing",
    "inference_engine.text_score",
    "inference_engine.tokenizer",
    "layers.collectives.mode",
    "layers.errors",
    "layers.flash_placement",
    "layers.hparams",
    "layers.ring_schedule",
    "run_serving",
)
# Processor time; importing jax alone takes several times as much.
PURE_IMPORT_SECONDS = 0.3
HEAVY = ("jax", "jaxlib", "flax", "orbax", "tensorstore", "scipy")

# Experimental interfaces without a public twin, each with the modules that may use it.
EXPERIMENTAL = {
    "jax.experimental.custom_partitioning": ("layers.ring_partitioning",),
    "jax.experimental.pallas": (
        "layers.pallas_backward",
        "layers.pallas_blocks",
        "layers.pallas_forward",
        "layers.pallas_tiles",
        "tests.kernel_blocks",
    ),
    "jax.experimental.topologies": (
        "tests.collectives_on_tpu",
        "tests.decode_on_tpu",
        "tests.ring_on_tpu",
    ),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


def source_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (REPO / folder).rglob("*.py")]
    return sorted(found + [path for path in (REPO / f"{folder}.py" for folder in folders) if path.exists()])


def imports_of(tree: ast.AST, module: str) -> Iterator[str]:
    """Dotted names that a syntax tree imports; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            prefix = ".".join(part for part in (base, node.module) if part)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


SHIPPED = source_files(*ORDER)
MODULES = {module_name(path): path for path in SHIPPED}
IMPORTS = {name: sorted(set(imports_of(ast.parse(path.read_text()), name))) for name, path in MODULES.items()}


def upward(module: str, imported: str) -> bool:
    """Whether a module of one package imports one that stands after it, or a development folder."""
    mine, theirs = module.partition(".")[0], imported.partition(".")[0]
    return theirs in OUTSIDE or (theirs in ORDER and ORDER.index(theirs) > ORDER.index(mine))


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph as the list of its nodes, empty if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for following in sorted(graph[node]):
            if cycle := walk(following, [*path, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := walk(node, []))), [])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)


def test_every_package_is_read() -> None:
    assert {"layers", "checkpoints", "inference_engine", "configs"} <= {
        name.split(".")[0] for name in MODULES
    }
    assert "layers.hparams" in IMPORTS
    assert "enum" in IMPORTS["layers.hparams"]


def test_imports_never_go_upward() -> None:
    assert upward("layers.params", "checkpoints.state.CheckpointState")
    assert upward("configs.models", "tests.reference_model")
    assert not upward("configs.models", "layers.hparams.HParams")
    bad = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        for name in names
        if upward(module, name)
    ]
    assert not bad, "\n".join(bad)


def test_modules_form_no_cycle() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    graph = {
        module: {
            target
            for name in names
            for target in (name, name.rpartition(".")[0])
            if target in MODULES and target != module
        }
        for module, names in IMPORTS.items()
    }
    assert any(graph.values())
    assert not find_cycle(graph), " → ".join(find_cycle(graph))


def test_package_inits_import_nothing() -> None:
    inits = [path for path in SHIPPED if path.name == "__init__.py"]
    assert len(inits) >= 4
    for path in inits:
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, f"{path.relative_to(REPO)} holds more than its docstring"
        assert isinstance(body[0], ast.Expr)
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(REPO)} has no docstring"


def test_jax_is_used_through_its_public_interface() -> None:
    assert private_jax("jax._src.core.Primitive", "layers.rope")
    assert private_jax("jax.experimental.shard_map", "layers.rope")
    assert not private_jax("jax.numpy", "layers.rope")
    paths = source_files(*ORDER, *OUTSIDE)
    trees = {module_name(path): ast.parse(path.read_text()) for path in paths}
    bad = [
        f"{module}: {name}"
        for module, tree in trees.items()
        for name in [*imports_of(tree, module), *attributes_of(tree)]
        if private_jax(name, module)
    ]
    assert not bad, "\n".join(bad)


def private_jax(name: str, module: str) -> bool:
    """Whether a dotted name is jax's own business, or experimental without a stated reason."""
    parts = name.split(".")
    if parts[0] not in ("jax", "jaxlib"):
        return False
    allowed = module in EXPERIMENTAL.get(".".join(parts[:3]), ())
    experimental = parts[1:2] == ["experimental"] and not allowed
    return parts[0] == "jaxlib" or experimental or any(part.startswith("_") for part in parts)


def attributes_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names such as `jax.experimental.layout` that an expression reads."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_without_jax(module: str) -> None:
    assert module in MODULES, f"{module} is gone; correct the list PURE"
    code = f"""
import sys, time
for name in {HEAVY!r}:
    sys.modules[name] = None
start = time.process_time()
import {module}
print(time.process_time() - start)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < PURE_IMPORT_SECONDS


def test_a_module_that_needs_jax_is_found_out() -> None:
    done = run_python(f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\nimport layers.rope")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_every_third_party_import_is_declared() -> None:
    declared, optional = requirements(), requirements("extras_require")
    assert {"jax", "numpy", "absl-py"} <= declared
    third_party = distributions(name for names in IMPORTS.values() for name in names)
    assert "jax" in third_party
    unknown = third_party - declared - optional
    assert not unknown, f"neither in install_requires nor in an extra of setup.py: {sorted(unknown)}"


def test_packages_of_extras_are_imported_only_where_they_are_used() -> None:
    declared = requirements()
    for module, path in MODULES.items():
        at_import = distributions(imports_at_import(ast.parse(path.read_text()), module))
        assert at_import <= declared, f"{module} needs {sorted(at_import - declared)} to be imported"


def imports_at_import(tree: ast.Module, module: str) -> Iterator[str]:
    """What importing a module imports: not what functions and type-checking blocks do."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_of(node, module)


def distributions(names: Iterable[str]) -> set[str]:
    """Third-party packages among imported names, as the package index calls them."""
    used = {name.split(".")[0] for name in names} - {*ORDER, *OUTSIDE}
    return {DISTRIBUTIONS.get(name, name) for name in used - sys.stdlib_module_names}


# Import names that differ from the names on the package index.
DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


def setup_keywords() -> dict[str, ast.expr]:
    """The keyword arguments of the call to `setup`, as syntax."""
    tree = ast.parse((REPO / "setup.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup"]
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def requirements(keyword: str = "install_requires") -> set[str]:
    """Names of the core requirements, or of all extras' together, without their versions."""
    listed = ast.literal_eval(setup_keywords()[keyword])
    texts = listed if isinstance(listed, list) else [text for extra in listed.values() for text in extra]
    return {"".join(c if c.isalnum() or c in "-_" else " " for c in text).split()[0] for text in texts}


def test_every_package_folder_is_listed_in_setup() -> None:
    listed = set(ast.literal_eval(setup_keywords()["packages"]))
    found = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    folders = {module_name(path.parent / "__init__.py") for path in SHIPPED if path.parent != REPO}
    assert folders == found, f"without __init__.py: {sorted(folders - found)}"
    assert listed == found
