"""The table of hooks: targets and functions exist, the document is made from it, nothing else changes SGLang."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dsv4.seam import hook_kinds, hooks, install
from sglang_dsv4.seam.hooks import HOOKS, SELF_CHECK, Hook, Kind, Process
from sglang_dsv4.seam.rows import cpu, sampling

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "sglang_dsv4"
ALL = (*SELF_CHECK, *HOOKS)
IN_REGISTRY = (Kind.BEFORE, Kind.AFTER, Kind.AROUND, Kind.REPLACE)


def name_of(hook: Hook) -> str:
    return f"{hook.target.split('.')[-1]}-{hook.function.split(':')[-1]}"


def test_the_document_is_made_from_the_table() -> None:
    written = (ROOT / "docs" / "hooks.md").read_text()
    assert written == hooks.document(), "python -m sglang_dsv4.seam.hooks > docs/hooks.md"


def test_a_row_is_there_once_and_complete() -> None:
    assert len({(hook.target, hook.function) for hook in ALL}) == len(ALL)
    assert all(hook.why and hook.until for hook in ALL)
    assert set(hook_kinds.KINDS) == set(Kind)


@pytest.mark.parametrize("hook", ALL, ids=name_of)
def test_our_function_exists(hook: Hook) -> None:
    if hook.kind is Kind.ENVIRONMENT:
        assert pkgutil.resolve_name(hook.function)
    else:
        assert callable(install.ours(hook))


@pytest.mark.parametrize("hook", [hook for hook in ALL if hook.kind is not Kind.ENTRY_POINT], ids=name_of)
def test_the_target_exists_in_the_tested_version(hook: Hook) -> None:
    if hook.kind is Kind.RESOLUTION:
        from sglang.srt.arg_groups import resolution_hooks

        assert hook.target in resolution_hooks._OVERRIDABLE_HOOKS
    elif hook.kind is Kind.ATTRIBUTE:  # an instance has it, so its class's source says it
        owner, _, attribute = hook.target.rpartition(".")
        assert attribute in inspect.getsource(pkgutil.resolve_name(owner))
    elif hook.kind is not Kind.ENVIRONMENT:
        assert callable(pkgutil.resolve_name(hook.target))


@pytest.mark.parametrize("hook", [hook for hook in ALL if hook.kind in IN_REGISTRY], ids=name_of)
def test_our_function_can_take_the_targets_arguments(hook: Hook) -> None:
    """Our function takes required arguments by position or, as SGLang passes them to some targets, by name."""
    target, ours = pkgutil.resolve_name(hook.target), install.ours(hook)
    try:
        parameters = inspect.signature(inspect.unwrap(getattr(target, "__func__", target))).parameters.values()
    except ValueError:  # torch.Tensor.record_stream has none
        return
    extra = {Kind.AFTER: ("result",), Kind.AROUND: ("original",)}.get(hook.kind, ())
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    try:
        inspect.signature(ours).bind(*extra, *plain, **dict.fromkeys(named))
    except TypeError:
        inspect.signature(ours).bind(*extra, **dict.fromkeys([*(p.name for p in plain), *named]))


def test_importing_the_table_imports_nothing_else() -> None:
    code = (
        "import sys; import sglang_dsv4.seam.hooks; "
        "print([m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plugin_is_loaded_without_a_client_of_metrics() -> None:
    """prometheus_client reads the folder of a server's metrics when it is imported. A launcher names that folder after
    it has loaded the plugin, and may have imported the scheduler before: SGLang's `Engine` does."""
    code = (
        "import sys, sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang_dsv4.seam.install import installed\n"
        "print(len(installed()) > 100, 'prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


# ---- how rows are installed


def test_our_function_is_imported_at_its_first_call() -> None:
    hook = HOOKS[-1]._replace(function="sglang_dsv4.nowhere:nothing")
    call = install._lazily(hook)
    with pytest.raises(ImportError):
        call()
    assert install._lazily(hook._replace(function="operator:add"))(2, 3) == 5


def test_a_target_whose_module_needs_a_missing_package_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang leaves such a module out as well. A target that SGLang does not have is an error."""
    package = tmp_path / "sglang_part"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "route.py").write_text("import a_package_that_is_missing\nclass Route: serve = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = install.installed()
    row = HOOKS[0]._replace(kind=Kind.BEFORE, target="sglang_part.route.Route.serve", function="operator:add")
    install.install(row)
    (line,) = [record.getMessage() for record in caplog.records if record.name == install.__name__]
    assert "sglang_part.route.Route.serve is not hooked" in line and "a_package_that_is_missing" in line
    for target in ("sglang.srt.nowhere.Route.serve", "sglang.srt.server_args.ServerArgs.nothing", "sglang_part.none.x"):
        with pytest.raises(AttributeError):
            install.install(row._replace(target=target))
    assert install.installed() == before


def test_an_attribute_is_set_by_its_row_and_by_no_other() -> None:
    owner = SimpleNamespace(enable_deterministic=False, other=1)
    install.set_attribute(owner, sampling.LOG_SOFTMAX)
    assert owner.enable_deterministic is True
    with pytest.raises(ValueError):
        install.set_attribute(owner, "other")
    with pytest.raises(AttributeError):
        install.set_attribute(SimpleNamespace(), hooks.DISPATCHER)


def test_an_attribute_can_be_set_for_a_while() -> None:
    def view(record: object) -> SimpleNamespace:
        return SimpleNamespace(device="cpu", tp_size=2)

    owner = SimpleNamespace(resolving_view=view)
    with pytest.raises(ZeroDivisionError), install.attribute_set(owner, cpu.RESOLVING_VIEW):
        seen = owner.resolving_view(None)
        assert (seen.device, seen.tp_size) == ("cuda", 2)
        raise ZeroDivisionError
    assert owner.resolving_view is view


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4 import plugin

    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    assert plugin.processes() == {Process.EVERY, Process.LAUNCHER}
    monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: object())
    assert plugin.processes() == {Process.EVERY}
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", SimpleNamespace())
    assert plugin.processes() == {Process.EVERY, Process.SCHEDULER}


# ---- nothing of SGLang is changed elsewhere

INSTALLS = "seam/install.py"
STAND_INS = "cpu/shims.py"  # makes modules of its own in the place of triton; a row of kind ENTRY_POINT
REGISTERS = ("HookRegistry", "plugin_hook", "register_resolution_hook")


def imported_from_sglang(tree: ast.AST) -> set[str]:
    """Names that a module binds to SGLang's, or torch's, modules, functions and classes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] in FOREIGN}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


FOREIGN = ("sglang", "torch")


def changes(tree: ast.AST) -> list[str]:
    """Statements of a module that could change SGLang's code: registrations, attributes set on imports, patches."""
    foreign, found = imported_from_sglang(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("setattr", "delattr") or (called.startswith("register_") and called not in ALLOWED_CALLS):
                found.append(f"{node.lineno}: {called}")
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in REGISTERS:
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            for target in getattr(node, "targets", None) or [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
                        root = part
                        while isinstance(root, ast.Attribute | ast.Subscript):
                            root = root.value
                        if isinstance(root, ast.Name) and root.id in foreign:
                            found.append(f"{node.lineno}: {ast.unparse(part)} = ...")
    return found


# PyTorch's, on modules of our own; and the interface by which a storage backend gets its memory.
ALLOWED_CALLS = (
    *("register_buffer", "register_parameter", "register_forward_hook", "register_forward_pre_hook"),
    "register_mem_pool_host",
)


def test_sglang_is_changed_by_rows_of_the_table_only() -> None:
    wrong = {
        name: found
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := str(path.relative_to(PACKAGE))) not in (INSTALLS, STAND_INS)
        if (found := changes(ast.parse(path.read_text())))
    }
    assert not wrong, "add a row to sglang_dsv4/seam/hooks.py"


def test_changes_are_seen() -> None:
    """The check above, on a file that breaks the rule in each way."""
    tree = ast.parse(
        "from sglang.srt.a import B\n"
        "import sglang.srt.c as c\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "B.method = 1\n"
        "c.REGISTRY['x'] = 1\n"
        "HookRegistry.register('x', f)\n"
        "setattr(x, 'y', 1)\n"
        "c.register_attention_backend('x')(f)\n"
        "del B.method\n"
        "x = B.method\n"
    )
    assert {int(found.split(":")[0]) for found in changes(tree)} == {4, 5, 6, 7, 8, 9}
