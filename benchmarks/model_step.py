"""A model of the time of our kernels and of a step: errors on an H200, predictions for B200 and B300.

    python benchmarks/model_step.py [--write]     writes benchmarks/results/step_model.json
    python benchmarks/model_step.py --fit         fits the constants anew and prints them; they stand in hardware.py

`step_model/` has the model: `hardware.py` (published figures and fitted constants), `launch.py` (the formula), a
module for the counts of each kind of kernel, `step.py` (the launches of a forward), `measured.py` (our measured
kernels: those that the constants were fitted to, and those that were held out), `what_if.py` (plans that do not
exist), `own_rows.py` (prefills whose rows are sharded), `blind.py` (predictions that a later measurement tests).
docs/step_model.md says what the figures are good for.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from step_model import blind, measured, own_rows, what_if
from step_model.hardware import GPUS, H200
from step_model.step import FLASH, PRO, Forward, Released, predict

RESULT = Path(__file__).parent / "results" / "step_model.json"
REQUESTS, RANKS, CONTEXT = (1, 16, 64, 128), (1, 4, 8), 4608
CHUNK, CHUNK_CONTEXT = 8192, 32_768
LISTED_US = 20.0
ABOVE_FLOOR = 1.5
PUBLISHED = (
    {
        "model": "flash",
        "gpus": "4 x B200",
        "requests": 1,
        "ms": [6.3, 7.0],
        "by": "vLLM, no drafts (vllm#44891, June 2026)",
    },
    {
        "model": "pro",
        "gpus": "8 x B200",
        "requests": 1,
        "ms": [10.3, 10.5],
        "by": "vLLM, no drafts (vllm#44891, June 2026)",
    },
    {"model": "flash", "gpus": "B200", "requests": 16, "ms": [5.44], "by": "SGLang cookbook, TPOT beside prefills"},
    {"model": "flash", "gpus": "B300", "requests": 1, "ms": [2.83], "by": "SGLang cookbook, NVFP4, TPOT"},
)
"""Steps that others have published; none says how its time divides."""


def forwards(model: Released) -> list[Forward]:
    """Return the forwards of the table."""
    found = [Forward(model, tokens, CONTEXT, ranks) for ranks in RANKS for tokens in REQUESTS]
    return found + [Forward(model, CHUNK, CHUNK_CONTEXT, ranks, prefill=True) for ranks in RANKS]


def row(gpu_name: str, f: Forward) -> dict[str, object]:
    """Return the prediction of a forward."""
    prediction = predict(f, GPUS[gpu_name])
    of_forward = {"gpu": gpu_name, "model": f.model.name, "ranks": f.ranks, "prefill": f.prefill, "tokens": f.tokens}
    of_forward |= {"ms": round(prediction.us / 1e3, 2), "floor_ms": round(prediction.floor_us / 1e3, 2)}
    return of_forward | {"launches": prediction.launches}


def worst_of(f: Forward, gpu_name: str) -> list[dict[str, object]]:
    """Return the launches of a forward that are above ABOVE_FLOOR times their floor, the most lost time first."""
    prediction = predict(f, GPUS[gpu_name])
    found = []
    for name, us in prediction.by_launch.items():
        floor = prediction.by_floor.get(name, 0.0)
        if us - floor >= LISTED_US and us > ABOVE_FLOOR * floor:
            bound = prediction.bounds.get(name, "launches")
            reach = prediction.by_reach.get(name, us)
            found.append(
                {
                    "launch": name,
                    "us": round(us),
                    "floor_us": round(floor),
                    "over_reach": round(us / reach, 2),
                    "largest_term": bound,
                }
            )
    return sorted(found, key=lambda entry: entry["floor_us"] - entry["us"])


def document() -> dict[str, object]:
    """Return the content of step_model.json."""
    kinds = {"fitted": measured.FITTED, "one_rate": measured.ONE_RATE, "held_out": measured.HELD_OUT}
    errors: dict[str, dict] = {which: {} for which in kinds}
    of_all: dict[str, float] = {}
    for which, families in kinds.items():
        for name, cases in families.items():
            ratios = measured.ratios(cases)
            errors[which][name] = asdict(measured.Errors.of(ratios))
            if which == "held_out":
                of_all |= {f"{name}: {case}": ratio for case, ratio in ratios.items()}
    steps = measured.ratios_of_steps()
    return {
        "fitted_constants": asdict(H200.fitted),
        "errors": errors,
        "held_out": asdict(measured.Errors.of(of_all)),
        "steps": asdict(measured.Errors.of(steps)),
        "predicted_over_measured_steps": {name: round(ratio, 3) for name, ratio in steps.items()},
        "left_out": measured.LEFT_OUT,
        "context": CONTEXT,
        "chunk": {"tokens": CHUNK, "context": CHUNK_CONTEXT},
        "predictions": [row(gpu, f) for gpu in ("B200", "B300") for model in (FLASH, PRO) for f in forwards(model)],
        "published": list(PUBLISHED),
        "worst_of_64_requests": {
            f"{model.name}, {ranks} GPUs": worst_of(Forward(model, 64, CONTEXT, ranks), "B200")
            for model, ranks in ((FLASH, 4), (PRO, 8))
        },
        "blind": blind.predictions(),
        "what_if": {
            "few_heads": what_if.few_heads(),
            "tiles_of_products": what_if.tiles_of_products(),
            "clusters": what_if.clusters(),
            "own_rows": own_rows.table(),
            "boundaries": what_if.boundaries(),
        },
    }


def main() -> None:
    """Print the errors and the predictions; the last line is the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
    options = parser.parse_args()
    if options.fit:
        print(measured.fit())
        return
    made = document()
    for which, families in made["errors"].items():
        for name, found in families.items():
            print(f"{which:9} {name:42} {found['mean']:6.1%}, worst {found['worst']:6.1%}: {found['worst_case']}")
    print(f"held out, all: {made['held_out']}\nsteps: {made['steps']}")
    for entry in made["predictions"]:
        print(" ".join(f"{key} {value}" for key, value in entry.items()))
    if options.write:
        RESULT.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
