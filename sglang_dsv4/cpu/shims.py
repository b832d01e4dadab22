"""What SGLang 0.5.23 needs before it can be imported on a machine with no GPU, and where that is switched on.

SGLang's wheel assumes a CUDA host. Two imports fail elsewhere, in every process of the server:

* ``triton``: imported by SGLang at the top, never launched on the CPU path. Where it is not installed, a stand-in
  takes its place as soon as ``sglang`` is imported. It is the one that SGLang ships for Apple machines.
* ``torchvision``: PyPI's wheel is linked against CUDA, so beside a CPU build of torch its operators are missing and
  ``import torchvision`` (and with it transformers) fails. Declaring two operator schemas first is enough.

An SGLang plugin is loaded too late for either, so they sit in an import hook that a one-line ``.pth`` file puts in
place when Python starts. That file is not part of the wheel: it exists only where somebody ran

    python -m sglang_dsv4.cpu.shims install        # also: remove, status

``make serve`` and ``make test`` run it in their own virtual environment. A GPU host never needs it; if it is there
nevertheless, both hooks see that the real packages work and do nothing. ``SGLANG_DSV4=off`` turns it off as well, and
then only says why SGLang's import fails here. The third obstacle, ``sgl_kernel``, is met by
:mod:`sglang_dsv4.cpu.platform`, which SGLang finds by an entry point; where that is missing it complains of a missing
accelerator, so the hook says what is missing.

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

PTH_NAME = "sglang_dsv4_cpu.pth"
# One line, because `site` executes only lines that start with `import`. find_spec: the file may outlive the package.
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
    """Ends the process if ``SGLANG_DSV4`` is neither of the words for on nor of those for off.

    For the server's processes only: this module itself is loaded by every Python process of the environment.

    Raises:
        SystemExit: the one exception that SGLang's plugin loader does not swallow.
    """
    if _switch() not in (*env.ON_WORDS, *env.OFF_WORDS):
        raise SystemExit(
            f"SGLANG_DSV4 is {env.text('SGLANG_DSV4')!r}; expected one of {', '.join(env.OFF_WORDS)} to turn "
            f"sglang-dsv4 off, one of {', '.join(env.ON_WORDS)} to keep it on, or no such variable (on)."
        )


def _switch() -> str:
    return (env.text("SGLANG_DSV4") or "on").lower()


class CpuImportHook:
    """A ``sys.meta_path`` finder that finds nothing: it acts just before ``sglang`` or ``torchvision`` is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Called by the import system for every module that is not loaded yet."""
        if fullname == "sglang":
            warn_unless_sglang_loads_us()
            install_triton_stand_in()
        elif fullname == "torchvision":
            declare_torchvision_operators()


class OffNotice:
    """The last ``sys.meta_path`` finder: where SGLang's import fails for want of triton, the error says why."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Called by the import system for every module that is not found elsewhere.

        Raises:
            ModuleNotFoundError: SGLang asks for triton, as it would without this finder.
        """
        if fullname == "triton" and "sglang" in sys.modules:
            raise ModuleNotFoundError(
                f"No module named 'triton'. SGLANG_DSV4={_switch()} leaves DeepSeek-V4 to SGLang's own "
                "code, which needs a GPU and the package triton. Unset SGLANG_DSV4 to serve on a CPU.",
                name="triton",
            )


def activate() -> None:
    """Puts the import hook in place, once; under ``SGLANG_DSV4=off`` nothing but a better error."""
    if any(isinstance(finder, CpuImportHook | OffNotice) for finder in sys.meta_path):
        return
    if is_off():
        sys.meta_path.append(OffNotice())
    else:
        sys.meta_path.insert(0, CpuImportHook())


@functools.cache  # once a process, however often somebody looks for sglang
def warn_unless_sglang_loads_us() -> None:
    """One line on stderr if SGLang would run without this package: none of our code will be there to say it later."""
    obstacle = why_sglang_does_not_load_us()
    if obstacle is not None:
        print(f"sglang-dsv4: {obstacle}", file=sys.stderr)


def why_sglang_does_not_load_us() -> str | None:
    """What keeps SGLang from finding this package in this environment, and what to do; None if nothing does."""
    import importlib.metadata  # takes longer than the rest of this module, and most programs never get here

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
    """Makes ``import triton`` succeed where Triton is not installed, with SGLang's own stand-in module.

    Raises:
        ImportError: SGLang is installed but its stand-in is not where version 0.5.23 keeps it.
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
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)

    sys.meta_path.insert(0, StandInFinder(stubs._MockModule))
    import triton

    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    # These are used as types, in annotations and isinstance: the stand-in's attributes are modules unless set.
    for module, name in (
        ("triton.language", "constexpr"),
        ("triton.runtime.jit", "JITFunction"),
        ("triton.runtime.jit", "KernelInterface"),
    ):
        stand_in = type(name, (stubs._StubBase,), {"__init__": _accept_anything})
        setattr(importlib.import_module(module), name, stand_in)
    triton.language.constexpr.__init__ = _keep_value  # PyTorch forms of some kernels read their constants
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        importlib.import_module(module).triton_key = stubs._triton_key


class StandInFinder:
    """Finds ``triton`` and everything below it: a module of ``module_type``, made on the spot.

    SGLang's own finder leaves the making to the import system, which then makes plain modules with no attributes.
    """

    def __init__(self, module_type: type[ModuleType]) -> None:
        self.module_type = module_type

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package with this object as its loader, for ``triton`` and its submodules."""
        if fullname != "triton" and not fullname.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in module; the import system enters it into ``sys.modules``."""
        return self.module_type(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _accept_anything(self: object, *args: object, **kwargs: object) -> None:
    """Initialiser of the stand-in classes."""


def _keep_value(self: object, value: object = None) -> None:
    """Initialiser of the stand-in for ``triton.language.constexpr``."""
    vars(self)["value"] = value


def declare_torchvision_operators() -> None:
    """Declares ``torchvision::nms`` and ``qnms`` where torchvision is a CUDA build and torch is a CPU build."""
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
    """Where ``install`` puts the ``.pth`` file: the running interpreter's site-packages."""
    return Path(sysconfig.get_paths()["purelib"]) / PTH_NAME


def main(arguments: list[str]) -> int:
    """``install``, ``remove`` or ``status``; prints what it did. Returns the exit status."""
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
