"""The plugin's decisions and the start-up check, without a server."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4 import plugin
from sglang_dsv4.cpu import shims
from sglang_dsv4.requests import checks as request_checks
from sglang_dsv4.seam import compat
from sglang_dsv4.warmup import cuda_graphs

ROOT = Path(__file__).resolve().parents[3]
OURS = ["DeepseekV4ForCausalLM"]


@pytest.fixture(scope="module", autouse=True)
def our_models_are_registered() -> None:
    """SGLang fills its registry once a process, by the environment: before a test here changes that."""
    os.environ.setdefault(compat.MODEL_PACKAGE_VARIABLE, compat.OUR_MODELS)
    compat.require_our_model_classes()


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_failures", [])
    monkeypatch.setattr(compat, "_live", None)


def arguments(**fields: Any) -> SimpleNamespace:
    unset = {
        "device": "cpu",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "max_total_tokens": None,
        "max_running_requests": None,
        "radix_cache_backend": None,
        "enable_streaming_session": False,
        "disaggregation_mode": "null",
        "speculative_algorithm": None,
        "speculative_use_rejection_sampling": False,
        "pp_size": 1,
        "attn_dp_size": 1,
        "moe_a2a_backend": "none",
        "page_size": None,
        "enable_hierarchical_cache": False,
        "hicache_host_memory_mode": "cache",
        "hicache_host_memory_fraction": 0.8,
        "enable_lora": False,
    }
    return SimpleNamespace(**{**unset, **fields})


FLOAT_CONFIG = SimpleNamespace(dtype="float32")
CONFIG = SimpleNamespace(dtype="bfloat16")


def test_a_cpu_user_needs_no_flags() -> None:
    assert plugin.default_arguments(arguments(), CONFIG) == {
        "radix_cache_backend": "dsv4",
        "kv_cache_dtype": "bfloat16",
        "max_total_tokens": 65536,
        "max_running_requests": 32,
    }


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_float32_weights_stay_float32_on_a_cpu(dtype: str) -> None:
    """SGLang's `--dtype auto` makes float16 of them."""
    assert plugin.default_arguments(arguments(), SimpleNamespace(dtype=dtype))["dtype"] == "float32"


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, [0, 1], "0,1"),
        (2, [0, 1], "0|1"),
        (2, [0, 1, 2, 3, 4], "0,1|2,3"),
        (4, [3, 7], "3|7|3|7"),
    ],
)
def test_cores_are_shared_out_among_ranks(ranks: int, cores: list[int], expected: str) -> None:
    assert plugin.cores_of_ranks(ranks, cores) == expected


def test_a_gpu_keeps_sglangs_sizes() -> None:
    assert plugin.default_arguments(arguments(device="cuda"), CONFIG) == {"radix_cache_backend": "dsv4"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("max_total_tokens", 512),
        ("max_running_requests", 1),
        ("radix_cache_backend", "other"),
    ],
)
def test_what_the_user_set_is_left_alone(field: str, value: object) -> None:
    assert field not in plugin.default_arguments(arguments(**{field: value}), FLOAT_CONFIG)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
        ("disaggregation_mode", "decode", "--disaggregation-mode decode"),
        ("speculative_use_rejection_sampling", True, "--speculative-use-rejection-sampling on a CPU"),
        ("page_size", 64, "--page-size 64"),
    ],
)
def test_unsupported_flags_are_refused_by_name(field: str, value: object, flag: str) -> None:
    plugin.refuse_unsupported_arguments(arguments(page_size=256), CONFIG)
    with pytest.raises(ValueError, match=flag):
        plugin.refuse_unsupported_arguments(arguments(**{field: value}), CONFIG)


@pytest.fixture(scope="module")
def resolved(checkpoint: Path) -> Callable[..., Any]:
    """SGLang's own resolution of a server's arguments, with the plugin as it is installed."""
    import sglang.srt.managers.scheduler  # noqa: F401 - plugins are loaded once a process; other tests need it before
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()

    def resolve(**fields: Any) -> Any:
        server_args = ServerArgs(model_path=str(checkpoint), device="cpu", **fields)
        server_args.resolve_once()
        return resolving_view(server_args)

    return resolve


@pytest.mark.parametrize("chunk", [-1, 256, 1 << 20])
def test_a_cpu_has_memory_whatever_the_chunk(chunk: int, resolved: Callable[..., Any]) -> None:
    """SGLang took 1.5 MB for each of 16,384 tokens off it: with -1 the fraction was below 0 on 24 GB."""
    assert resolved(chunked_prefill_size=chunk).mem_fraction_static == plugin.CPU_MEM_FRACTION_STATIC
    assert resolved(chunked_prefill_size=chunk, mem_fraction_static=0.3).mem_fraction_static == 0.3


def test_sglang_does_not_replace_a_page_size_without_a_word(resolved: Callable[..., Any]) -> None:
    assert resolved().page_size == resolved(page_size=256).page_size == 256
    with pytest.raises(ValueError, match="--page-size 64: pages hold 256 tokens"):
        resolved(page_size=64)


def test_no_draft_is_loaded_that_the_checkpoint_does_not_hold() -> None:
    """SGLang would build an MTP module for EAGLE and fill half of it from the tensors of a DSpark draft."""
    dspark = SimpleNamespace(dspark_target_layer_ids=[2, 3, 4])
    plugin.refuse_unsupported_arguments(arguments(), dspark)
    plugin.refuse_unsupported_arguments(arguments(speculative_algorithm="EAGLE"), CONFIG)
    for device in ("cpu", "cuda"):
        plugin.refuse_unsupported_arguments(arguments(speculative_algorithm="DSPARK", device=device), dspark)
    with pytest.raises(ValueError, match="EAGLE with this checkpoint: its draft is DSpark's"):
        plugin.refuse_unsupported_arguments(arguments(speculative_algorithm="EAGLE"), dspark)
    with pytest.raises(ValueError, match="DSPARK with this checkpoint: it has no DSpark draft"):
        plugin.refuse_unsupported_arguments(arguments(speculative_algorithm="DSPARK"), CONFIG)


@pytest.mark.usefixtures("own_registry")
def test_cuda_graphs_wait_for_kernels() -> None:
    """References read lengths on the host; a kernel that is registered as safe for graphs takes them off the list."""
    from dsv4_kernels import registry

    for name, priority, graph_safe in (("waiting", 1000, False), ("capturable", 1001, True)):
        registry.register(
            "index_topk", name, "nowhere:nothing", lambda device, dtype: True, priority, graph_safe=graph_safe
        )
        assert ("index_topk" in cuda_graphs.uncapturable_ops("cuda", 512)) == (not graph_safe)


@pytest.mark.parametrize(
    ("architecture", "switch", "ranks", "named"),
    [
        ("DeepseekV4ForCausalLM", None, 1, "deepseek_v41"),
        ("DeepseekV4ForCausalLM", None, 2, "deepseek_v4"),
        ("DeepseekV4ForCausalLM", "off", 1, "deepseek_v4"),
        ("DeepseekV4ForCausalLM", "on", 2, "deepseek_v41"),
        ("DeepseekV3ForCausalLM", "on", 1, "deepseek_v4"),
    ],
)
def test_verify_steps_end_as_asked(
    architecture: str, switch: str | None, ranks: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type by which SGLang decides, of ours only, and what else it decides by that."""
    from sglang.srt import runtime_context
    from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))

    monkeypatch.delenv(cuda_graphs.VERIFY_EPILOGUE, raising=False)
    if switch is not None:
        monkeypatch.setenv(cuda_graphs.VERIFY_EPILOGUE, switch)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    assert cuda_graphs.model_type_for_epilogue("deepseek_v4", worker) == named
    monkeypatch.setenv(cuda_graphs.VERIFY_EPILOGUE, "perhaps")
    if architecture == "DeepseekV4ForCausalLM":
        with pytest.raises(ValueError, match=r"SGLANG_DSV4_VERIFY_EPILOGUE must be 'on' or 'off', got 'perhaps'"):
            cuda_graphs.model_type_for_epilogue("deepseek_v4", worker)
    sources = (inspect.getsource(module) for module in (dspark_worker_v2, dspark_verify))
    asked = [line.strip() for source in sources for line in source.splitlines() if "target_model_type(" in line]
    assert asked == [
        'target_is_dsv41 = target_model_type(self.target_worker) == "deepseek_v41"',
        "def target_model_type(target_worker) -> Optional[str]:",
        "return target_model_type(target_worker) in _FUSED_ARGMAX_TARGETS",
        'self._target_is_dsv41 = target_model_type(target_worker) == "deepseek_v41"',
    ]


def test_cuda_graphs_do_not_wait_for_an_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU there is one, for the release's head_dim; another is served by the reference, which waits."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert cuda_graphs.uncapturable_ops("cuda", 512) == []
    assert cuda_graphs.uncapturable_ops("cuda", 64) == ["sparse_attention"]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM"])
def test_other_speculation_on_a_cpu_is_refused_before_anything_is_loaded(algorithm: str) -> None:
    from sglang.srt.arg_groups.speculative_hook import _check_oot_speculative_algorithm

    _check_oot_speculative_algorithm("EAGLE", "cpu")
    with pytest.raises(ValueError, match=f"{algorithm} speculative decoding is not supported by CpuPlatform"):
        _check_oot_speculative_algorithm(algorithm, "cpu")


def test_a_failure_stops_our_model_and_no_other() -> None:
    with compat.remembering_failures("installing hooks"):
        raise ImportError("no such thing")
    compat.require_ready(["LlamaForCausalLM"])
    with pytest.raises(
        compat.StartupError, match=r"(?s)installing hooks failed.*no such thing.*What to do.*SGLANG_DSV4=off"
    ):
        compat.require_ready(OURS)


def test_another_sglang_version_stops_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.0")
    compat.require_ready(["LlamaForCausalLM"])
    with pytest.raises(compat.StartupError, match=r"(?s)SGLang 0\.6\.0 is installed.*pip install sglang==0\.5\.23"):
        compat.require_ready(OURS)


def test_another_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks into one external package; with the user's own there it would serve its own DeepSeek-V4."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my.models")
    compat.require_ready(["LlamaForCausalLM"])
    with pytest.raises(compat.StartupError, match=r"(?s)SGLANG_EXTERNAL_MODEL_PACKAGE is 'my\.models'.*unset it"):
        compat.require_ready(OURS)


def test_everything_in_place_passes() -> None:
    compat.require_ready(OURS)


@pytest.mark.parametrize("part", ["model", "attention_backend", "kv_pool", "pool_sizing", "prefix_cache"])
def test_each_foreign_part_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = type("Ours", (), {"__module__": "sglang_dsv4.somewhere"})
    foreign = type("InTree", (), {"__module__": "sglang.srt.somewhere"})
    parts = {name: ours for name in ("model", "attention_backend", "kv_pool", "pool_sizing", "prefix_cache")}
    parts[part] = foreign
    monkeypatch.setattr(compat, "_pool_sizing", parts["pool_sizing"])
    runner = SimpleNamespace(
        model=parts["model"](), attn_backend=parts["attention_backend"](), token_to_kv_pool=parts["kv_pool"]()
    )
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tree_cache=parts["prefix_cache"]())
    with pytest.raises(
        compat.StartupError, match=rf"the live {part.replace('_', ' ')} is sglang\.srt\.somewhere\.InTree"
    ):
        compat.require_live(scheduler)  # type: ignore[arg-type]
    assert compat.live_parts() is None


def test_package_that_looks_like_ours_is_not_ours() -> None:
    assert not compat._is_our_class(type("X", (), {"__module__": "sglang_dsv4_fork.models"}))


@pytest.mark.parametrize("name", sorted(compat.SGLANG_NAMES))
def test_private_name_exists_in_the_tested_version(name: str) -> None:
    assert getattr(compat, name) is not None


def test_a_missing_private_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.SGLANG_NAMES, "Gone", "sglang.srt.utils:Gone")
    with pytest.raises(compat.StartupError, match=r"(?s)sglang\.srt\.utils:Gone.*pip install"):
        _ = compat.Gone


def test_a_hook_on_a_missing_target_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._gone"
    monkeypatch.setitem(compat.SGLANG_HOOKS, "build the KV pool", gone)
    with pytest.raises((AttributeError, ImportError)):
        plugin._hook("build the KV pool", lambda: None, "AROUND")


def test_without_its_check_the_plugin_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's plugin loader catches every Exception; SystemExit is none."""

    def fail(*_: object) -> None:
        raise AttributeError("Scheduler has moved")

    monkeypatch.setattr(plugin, "_hook", fail)
    with pytest.raises(SystemExit, match=r"start-up check.*Scheduler has moved.*SGLANG_DSV4=off"):
        plugin._install_self_check()


def test_model_module_that_fails_to_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, *args: object) -> object:
        if name == "sglang_dsv4.models.deepseek_v4":
            raise ImportError("forced")
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(compat.importlib, "import_module", broken)
    with pytest.raises(
        compat.StartupError, match=r"models\.deepseek_v4 could not be imported: ImportError\('forced'\)"
    ):
        compat.require_our_model_classes()


def request_of(ids: list[int], stop: set[int] | None = None, top_logprobs: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=ids,
        input_embeds=None,
        vocab_size=1024,
        sampling_params=SimpleNamespace(stop_token_ids=stop, sampling_seed=None, top_k=50),
        logprob=SimpleNamespace(top_logprobs_num=top_logprobs),
    )


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (request_of([3, 1024]), "Token id 1024 "),
        (request_of([-1, 3]), "Token id -1 "),
        (request_of([3], stop={7, 5000}), "Stop token id 5000 "),
        (request_of([], stop={-7}), "Stop token id -7 "),
        (request_of([3], top_logprobs=1025), "top_logprobs_num is 1025"),
        (request_of([]), "The prompt is empty"),
    ],
    ids=["too-large", "negative", "stop", "negative-stop", "top-logprobs", "empty"],
)
def test_unknown_token_ids_get_a_reason(request_: SimpleNamespace, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_checks.refuse_unknown_token_ids(None, request_) is None  # type: ignore[arg-type]  # another model
    monkeypatch.setattr(compat, "_live", object())
    reason = request_checks.refuse_unknown_token_ids(None, request_)  # type: ignore[arg-type]
    assert reason is not None and named in reason
    # SGLang runs a refused request for a token, with its sampling parameters.
    assert request_.sampling_params.stop_token_ids is None and request_.logprob.top_logprobs_num == 0
    assert request_checks.refuse_unknown_token_ids("too long", request_) == "too long"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setup", "named"),
    [(("flashinfer", None), "--sampling-backend pytorch"), (("pytorch", "EAGLE"), "--speculative-algorithm")],
    ids=["flashinfer", "speculation"],
)
def test_a_seed_that_cannot_be_honoured_gets_a_reason(
    setup: tuple[str, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flashinfer's sampler asserts that there are no seeds."""
    monkeypatch.setattr(compat, "_live", object())
    monkeypatch.setattr(request_checks, "sampling_setup", lambda: setup)
    greedy, seeded = request_of([5]), request_of([5])
    greedy.sampling_params.sampling_seed = seeded.sampling_params.sampling_seed = 7
    greedy.sampling_params.top_k = 1  # draws nothing: its seed does no harm
    assert request_checks.refuse_unknown_token_ids(None, greedy) is None  # type: ignore[arg-type]
    assert named in (request_checks.refuse_unknown_token_ids(None, seeded) or "")  # type: ignore[arg-type]
    assert seeded.sampling_params.sampling_seed is None
    seeded.sampling_params.sampling_seed = 7
    monkeypatch.setattr(request_checks, "sampling_setup", lambda: ("pytorch", None))
    assert request_checks.refuse_unknown_token_ids(None, seeded) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[0, 1023], [5]], ids=["whole-range", "one"])
def test_known_token_ids_pass(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_live", object())
    request = request_of(ids, stop={0, 1023}, top_logprobs=1024)
    assert request_checks.refuse_unknown_token_ids(None, request) is None  # type: ignore[arg-type]
    assert request.sampling_params.stop_token_ids == {0, 1023} and request.logprob.top_logprobs_num == 1024


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false"])
def test_off_turns_everything_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4.cpu import platform as cpu_platform

    monkeypatch.setenv("SGLANG_DSV4", value)
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    plugin.setup()
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in os.environ
    assert cpu_platform.activate() is None
    monkeypatch.setattr(sys, "meta_path", [])
    shims.activate()
    assert [type(finder) for finder in sys.meta_path] == [shims.OffNotice]


@pytest.mark.parametrize("value", ["no", "disabled", "flase"])
def test_an_unknown_switch_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the package on without a word. SGLang's plugin loader swallows every Exception; SystemExit is none."""
    monkeypatch.setenv("SGLANG_DSV4", value)
    with pytest.raises(SystemExit, match=rf"SGLANG_DSV4 is '{value}'; expected one of off, 0, false .*on, 1, true"):
        plugin.setup()
    monkeypatch.setattr(sys, "meta_path", [])
    shims.activate()  # at the start of every Python program: no place to stop


@pytest.mark.parametrize("value", ["on", "1", "True ", ""])
def test_words_for_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4", value)
    shims.require_known_switch()
    assert not shims.is_off()


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_a_program_without_sglang_sees_no_stand_in() -> None:
    done = run_python("import sys, torch, importlib.util as u; print('triton' in sys.modules, u.find_spec('triton'))")
    if done.stdout.strip() != "False None":
        pytest.skip("Triton is installed here: nothing stands in for it")


def test_importing_sglang_brings_the_stand_in_and_torchvision_works() -> None:
    done = run_python(
        "import sglang, triton, triton.language as tl, torchvision, torch._inductor.codecache\n"
        "@triton.jit\ndef kernel(x: tl.constexpr): return x\n"
        "print(triton.cdiv(7, 2), triton.next_power_of_2(5), callable(torchvision.ops.nms))"
    )
    assert done.stdout.strip() == "4 8 True", done.stderr[-2000:]


def test_off_leaves_python_as_it_was() -> None:
    done = run_python("import sys; print([f for f in sys.meta_path if 'CpuImportHook' in repr(f)])", SGLANG_DSV4="off")
    assert done.stdout.strip() == "[]"


def test_off_says_that_the_built_in_needs_a_gpu() -> None:
    """It said "No module named 'triton'" and no more."""
    done = run_python("import sglang.srt.server_args", SGLANG_DSV4="off")
    if done.returncode == 0:
        pytest.skip("Triton is installed here: SGLang can be imported without us")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: No module named 'triton'. SGLANG_DSV4=off leaves DeepSeek-V4 to SGLang"
    )
    assert "needs a GPU" in last
    other = "import importlib.util as u; print(u.find_spec('triton'), u.find_spec('a_module_that_is_not_there'))"
    assert run_python(other, SGLANG_DSV4="off").stdout.strip() == "None None"


def test_a_missing_entry_point_is_named_where_sglang_is_started() -> None:
    """SGLang said "No accelerator ... or platform plugin", and nobody named this package."""
    look = "import importlib.util as u; u.find_spec('sglang'); u.find_spec('sglang')"  # as an import does, in less time
    hide = "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints(())\n"
    lines = run_python(hide + look).stderr.splitlines()
    named = [line for line in lines if line.startswith("sglang-dsv4: SGLang will not find this package")]
    assert len(named) == 1 and "pip install -e ." in named[0] and "'sglang_dsv4_cpu'" in named[0]
    assert "sglang-dsv4:" not in run_python(look).stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SGLANG_PLUGINS", "one, two", "SGLANG_PLUGINS is 'one, two'. Add 'sglang_dsv4'"),
        ("SGLANG_PLUGINS", "one, sglang_dsv4", None),
        ("SGLANG_PLATFORM", "other", "SGLANG_PLATFORM is 'other'. Unset it"),
        ("SGLANG_PLATFORM", "sglang_dsv4_cpu", None),
    ],
    ids=["plugins-without-us", "plugins-with-us", "another-platform", "our-platform"],
)
def test_variables_that_keep_sglang_from_loading_us(
    variable: str, value: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shims.why_sglang_does_not_load_us() is None
    monkeypatch.setenv(variable, value)
    obstacle = shims.why_sglang_does_not_load_us()
    assert obstacle is None if said is None else said in (obstacle or "")


def test_the_entry_points_are_those_of_the_package() -> None:
    """`pyproject.toml` declares them; the names in `shims` are what is looked for."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group: set(names) for group, names in declared.items()} == {
        group: {name} for group, name in shims.ENTRY_POINTS.items()
    }


def test_shims_install_and_remove(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / shims.PTH_NAME
    monkeypatch.setattr(shims, "pth_path", lambda: path)
    assert shims.main(["install"]) == 0 and path.read_text().startswith("import ")
    assert shims.main(["status"]) == 0 and "shims installed" in capsys.readouterr().out
    assert shims.main(["remove"]) == 0 and not path.exists()
    assert shims.main(["remove"]) == 0  # twice is no error
    assert shims.main(["nonsense"]) == 2
