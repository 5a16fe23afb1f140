"""Which room may import which. The rules keep the solver free of torch and the layers acyclic."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import allocmoe

PACKAGE = Path(allocmoe.__file__).parent
MODULES = {
    ".".join(("allocmoe", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# room -> the only packages, and rooms of this package, that it may import
ALLOWED: dict[str, str] = {
    "errors": "",
    "codec": "allocmoe.errors",
    "artifacts": "allocmoe.errors allocmoe.codec numpy",
    "solver": "allocmoe.errors allocmoe.solver numpy",
    "progress": "",
    "routing": "torch triton allocmoe.routing",
    "kernels": "torch triton allocmoe.kernels",
    "report": "allocmoe.errors allocmoe.codec allocmoe.artifacts allocmoe.progress allocmoe.report "
    "matplotlib numpy",
}
# room -> what it must not import
FORBIDDEN: dict[str, str] = {
    "models": "routing kernels runtime profiling planning evaluation bench solver experiment cli",
    "runtime": "profiling planning evaluation bench solver experiment cli",
    "profiling": "evaluation planning bench experiment cli",
    "evaluation": "profiling planning bench report experiment cli",
    "bench": "profiling planning evaluation solver report experiment cli",
    "planning": "experiment cli",
    "experiment": "cli",
}


def imports(source: str, module: str) -> Iterator[str]:
    """The full name of everything that is imported anywhere in the source, in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                home = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            yield from (f"{home}.{alias.name}" for alias in node.names)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def room(name: str) -> list[str]:
    return [module for module in MODULES if inside(module, (f"allocmoe.{name}",))]


def imports_of(modules: list[str]) -> list[tuple[str, str]]:
    assert modules, "no such room"
    return [(m, name) for m in modules for name in imports(MODULES[m].read_text(), m)]


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from .g.h import i\n"
    assert list(imports(source, "p.q.r")) == ["a.b", "c.d", "p.q.e", "p.q.g.h.i"]
    assert ("allocmoe.runtime.control", "allocmoe.routing") in imports_of(room("runtime"))


@pytest.mark.parametrize("name", ALLOWED)
def test_a_low_room_imports_only_what_it_may(name: str) -> None:
    allowed = tuple(ALLOWED[name].split())
    for module, imported in imports_of(room(name)):
        standard = imported.split(".")[0] in sys.stdlib_module_names
        assert standard or inside(imported, allowed), f"{module} imports {imported}"


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_high_room_keeps_away_from_others(name: str) -> None:
    forbidden = tuple(f"allocmoe.{other}" for other in FORBIDDEN[name].split())
    for module, imported in imports_of(room(name)):
        assert not inside(imported, forbidden), f"{module} imports {imported}"


def test_only_the_plugin_imports_vllm() -> None:
    users = {module for module, name in imports_of(list(MODULES)) if inside(name, ("vllm",))}
    assert users
    assert users <= set(room("runtime.vllm"))


@pytest.mark.parametrize("package", ["allocmoe.cli", "rich"])
def test_only_the_command_line_imports(package: str) -> None:
    cli = (*room("cli"), "allocmoe.__main__")
    users = {module for module, name in imports_of(list(MODULES)) if inside(name, (package,))}
    assert users
    assert users <= set(cli)


def test_no_module_goes_through_the_lazy_public_names() -> None:
    # `from allocmoe import profile` would hide which room is meant
    public = {f"allocmoe.{name}" for name in allocmoe.__all__}
    assert not [(m, name) for m, name in imports_of(list(MODULES)) if name in public]


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["allocmoe", "allocmoe.cli.main"])
def test_importing_loads_neither_torch_nor_transformers(module: str) -> None:
    heavy = "{'torch', 'transformers'}"
    run_python(f"import sys, {module}; found = {heavy} & set(sys.modules); assert not found, found")


def test_solver_and_artifacts_work_without_torch() -> None:
    run_python(
        "import sys\n"
        "sys.modules.update(torch=None, transformers=None)\n"
        "from allocmoe import Plan, Sensitivity, AllocMoEError\n"
        "from allocmoe.solver import uniform\n"
        "assert uniform([4] * 4, 15) == (3, 4, 4, 4)\n"
    )


def test_every_public_name_resolves() -> None:
    assert sorted(allocmoe.__all__) == sorted(dir(allocmoe))
    for name in allocmoe.__all__:
        assert getattr(allocmoe, name).__name__ == name
    for name in ("profile", "solve", "apply", "evaluate", "benchmark", "make_plan", "load_text"):
        assert callable(getattr(allocmoe, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        allocmoe.nothing  # noqa: B018
