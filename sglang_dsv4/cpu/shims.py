"""An import hook with which SGLang 0.5.23 can be imported on a machine with no GPU.

SGLang's wheel assumes a CUDA host. Elsewhere two imports fail in every process of the server:

* ``triton``: SGLang imports it at the top of modules and launches none of its kernels on the CPU path. Where it is not
  installed, the stand-in that SGLang ships for Apple machines is installed when ``sglang`` is imported.
* ``torchvision``: PyPI's wheel is linked against CUDA. With a CPU build of torch its operators are missing, and
  ``import torchvision`` (and with it transformers) fails unless two operator schemas are declared first.

SGLang loads plugins too late for both, so a one-line ``.pth`` file installs the import hook when Python starts. The
wheel does not contain that file; this command writes it:

    python -m sglang_dsv4.cpu.shims install        # also: remove, status

``make serve`` and ``make test`` run the command in their own virtual environment. A GPU host does not need the file; if
it exists there, the hook finds that the real packages work, and does nothing. Under ``SGLANG_DSV4=off`` the hook only
explains why SGLang can't be imported here. A third import that would fail, ``sgl_kernel``, is avoided by
:mod:`sglang_dsv4.cpu.platform`, which SGLang finds by an entry point. Without that entry point SGLang reports a missing
accelerator, so the hook reports a missing entry point first.

This module runs at the start of every Python process of that environment: standard library only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_dsv4 import env
from sglang_dsv4.cpu import noise

PTH_NAME = "sglang_dsv4_cpu.pth"
# One line, since `site` executes only lines that start with `import`. find_spec: the package may be uninstalled first.
PTH_LINE = (
    "import importlib.util as u; "
    'u.find_spec("sglang_dsv4") and __import__("sglang_dsv4.cpu.shims", fromlist=["activate"]).activate()\n'
)

ENTRY_POINTS = {"sglang.srt.plugins": "sglang_dsv4", "sglang.srt.platforms": "sglang_dsv4_cpu"}  # group -> name

_keep_alive: list[Any] = []  # torch.library.Library objects undefine their operators when they are collected


def is_off() -> bool:
    """Whether ``SGLANG_DSV4=off`` turns this whole package off."""
    return _switch() in env.OFF_WORDS


def require_known_switch() -> None:
    """End the process if ``SGLANG_DSV4`` is none of the words for on and off.

    Only the server's processes call it: this module is loaded by every Python process of the environment.

    Raises:
        SystemExit: the one exception that SGLang's plugin loader does not catch.
    """
    if _switch() not in (*env.ON_WORDS, *env.OFF_WORDS):
        raise SystemExit(
            f"SGLANG_DSV4 is {env.text('SGLANG_DSV4')!r}; expected one of {', '.join(env.OFF_WORDS)} to turn "
            f"sglang-dsv4 off, one of {', '.join(env.ON_WORDS)} to keep it on, or no such variable (on)."
        )


def _switch() -> str:
    return (env.text("SGLANG_DSV4") or "on").lower()


class CpuImportHook:
    """A ``sys.meta_path`` finder that finds no module; it acts before ``sglang`` or ``torchvision`` is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None; the import system calls this for every module that is not loaded yet."""
        if fullname == "sglang":
            warn_unless_sglang_loads_us()
            install_triton_stand_in()
        elif fullname == "torchvision":
            declare_torchvision_operators()


class OffNotice:
    """The last ``sys.meta_path`` finder: explains the error if SGLang's import fails because triton is missing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None; the import system calls this for every module that no other finder found.

        Raises:
            ModuleNotFoundError: SGLang imports triton, which is not installed.
        """
        if fullname == "triton" and "sglang" in sys.modules:
            raise ModuleNotFoundError(
                f"No module named 'triton'. SGLANG_DSV4={_switch()} leaves DeepSeek-V4 to SGLang's own "
                "code, which needs a GPU and the package triton. Unset SGLANG_DSV4 to serve on a CPU.",
                name="triton",
            )


def activate() -> None:
    """Install the import hook, once; under ``SGLANG_DSV4=off`` install only the finder that explains the error."""
    if any(isinstance(finder, CpuImportHook | OffNotice) for finder in sys.meta_path):
        return
    if is_off():
        sys.meta_path.append(OffNotice())
    else:
        sys.meta_path.insert(0, CpuImportHook())


@functools.cache  # once a process, however often sglang is looked for
def warn_unless_sglang_loads_us() -> None:
    """Print one line to stderr if SGLang would run without this package, whose code could not report it later."""
    obstacle = why_sglang_does_not_load_us()
    if obstacle is not None:
        print(f"sglang-dsv4: {obstacle}", file=sys.stderr)


def why_sglang_does_not_load_us() -> str | None:
    """Why SGLang would not find this package in this environment, and what to do; None if it would."""
    import importlib.metadata  # takes longer than the rest of this module, and most programs don't need it

    missing = [
        f"{name!r} in the group {group!r}"
        for group, name in ENTRY_POINTS.items()
        if name not in importlib.metadata.entry_points(group=group).names
    ]
    if missing:
        return (
            f"SGLang will not find this package: its entry points are not installed ({' and '.join(missing)}). Without "
            "them SGLang serves its own DeepSeek-V4 on a GPU, and reports a missing accelerator on a CPU. "
            f"What to do: `{sys.executable} -m pip install -e .` in the checkout of sglang-dsv4."
        )
    plugins = env.text("SGLANG_PLUGINS")
    if plugins and ENTRY_POINTS["sglang.srt.plugins"] not in [name.strip() for name in plugins.split(",")]:
        return (
            f"SGLang will not load this package: SGLANG_PLUGINS is {plugins!r}. Add 'sglang_dsv4' to it, or unset it."
        )
    selected = env.text("SGLANG_PLATFORM")
    if selected and selected != ENTRY_POINTS["sglang.srt.platforms"]:
        return f"SGLang will not load this package: SGLANG_PLATFORM is {selected!r}. Unset it."
    return None


def install_triton_stand_in() -> None:
    """Make ``import triton`` succeed where Triton is not installed, with SGLang's own stand-in module.

    Raises:
        ImportError: SGLang is installed, and its stand-in is not in the file that version 0.5.23 has.
    """
    if "triton" in sys.modules or importlib.machinery.PathFinder.find_spec("triton") is not None:
        return
    sglang = importlib.machinery.PathFinder.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        return
    source = Path(sglang.origin).with_name("_platform_stubs.py")  # by path: `import sglang` would need triton
    spec = importlib.util.spec_from_file_location("sglang_dsv4._triton_stand_in", source)
    if spec is None or spec.loader is None or not source.exists():
        raise ImportError(f"sglang_dsv4 needs {source} as a stand-in for triton; SGLang 0.5.23 has it. See shims.py.")
    noise.silence()
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)

    sys.meta_path.insert(0, StandInFinder(stubs._MockModule))
    import triton

    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    # SGLang uses these as types, in annotations and isinstance; the stand-in's attributes are modules unless set.
    for module, name in (
        ("triton.language", "constexpr"),
        ("triton.runtime.jit", "JITFunction"),
        ("triton.runtime.jit", "KernelInterface"),
    ):
        stand_in = type(name, (stubs._StubBase,), {"__init__": _accept_anything})
        setattr(importlib.import_module(module), name, stand_in)
    triton.language.constexpr.__init__ = _keep_value  # the PyTorch versions of some kernels read their constants
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        importlib.import_module(module).triton_key = stubs._triton_key


class StandInFinder:
    """Finds ``triton`` and its submodules, each a new module of ``module_type``.

    SGLang's own finder lets the import system create the modules, which then are plain modules with no attributes.
    """

    def __init__(self, module_type: type[ModuleType]) -> None:
        self.module_type = module_type

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a package whose loader is this object, for ``triton`` and its submodules; else None."""
        if fullname != "triton" and not fullname.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in module; the import system puts it into ``sys.modules``."""
        return self.module_type(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def _accept_anything(self: object, *args: object, **kwargs: object) -> None:
    """The initialiser of the stand-in classes."""


def _keep_value(self: object, value: object = None) -> None:
    """The initialiser of the stand-in for ``triton.language.constexpr``."""
    vars(self)["value"] = value


def declare_torchvision_operators() -> None:
    """Declare ``torchvision::nms`` and ``qnms`` if torchvision is a CUDA build and torch is a CPU build."""
    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None or _keep_alive:
        return
    extension = Path(spec.origin).with_name("_C.so")
    if not extension.exists() or b"libtorch_cuda.so" not in extension.read_bytes():
        return  # a CPU build declares its own operators
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep_alive.append(library)


def pth_path() -> Path:
    """The path of the ``.pth`` file, in the running interpreter's site-packages."""
    return Path(sysconfig.get_paths()["purelib"]) / PTH_NAME


def main(arguments: list[str]) -> int:
    """Run ``install``, ``remove`` or ``status`` and print the result; returns the exit status."""
    path = pth_path()
    if arguments == ["install"]:
        path.write_text(PTH_LINE)
        print(f"CPU shims installed: {path}")
    elif arguments == ["remove"]:
        path.unlink(missing_ok=True)
        print(f"CPU shims removed: {path}")
    elif arguments == ["status"]:
        print(f"CPU shims {'installed' if path.exists() else 'not installed'}: {path}; off by SGLANG_DSV4: {is_off()}")
    else:
        print("usage: python -m sglang_dsv4.cpu.shims install|remove|status", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
