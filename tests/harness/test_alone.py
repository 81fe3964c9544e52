"""No benchmark imports another one's modules: what they share is the harness."""

from pathlib import Path

from tests.support.tree import ROOT, imports, modules


def borrowed(folder: Path) -> list[str]:
    """Returns the imports of a benchmark that lead into another one."""
    found: list[str] = []
    tree = modules(folder)
    for module in tree:
        own = module.path.partition("/")[0]
        for line in imports(module, {f"benchmarks.{other.name}" for other in tree}):
            parts = line.target.split(".")
            if parts[0] == "benchmarks" and len(parts) > 1 and parts[1] not in (own, "harness"):
                found.append(f"{module.path}:{line.line} imports {line.target}")
    return found


def test_no_benchmark_imports_another_one() -> None:
    assert borrowed(ROOT / "benchmarks") == []


def test_a_borrowed_module_is_found(tmp_path: Path) -> None:
    for name, text in {
        "comm/objects.py": "from benchmarks.harness import Report\nfrom benchmarks.comm.rank import main",
        "parax/rank.py": "def f():\n    from benchmarks.comm.objects import ray",
        "harness/rows.py": "import benchmarks.comm",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert borrowed(tmp_path) == [
        "harness/rows.py:1 imports benchmarks.comm",
        "parax/rank.py:2 imports benchmarks.comm.objects",
    ]
