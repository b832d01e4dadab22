"""Bytes and estimated time of a call of Hopper's experts, counted from its work list without a GPU.

    python benchmarks/experts_sm90_static.py [--models flash] [--slices 1] [--routing six,zipf] [--tokens 64,128]

For each shape of work tiles ("taken": the one that `launch.shape_for` chooses): work tiles of both products, the most
that one multiprocessor gets, the bytes that it reads for them (codes, scales and slots, by way of L2), and
microseconds:

    FIXED_US + the sum over both products of the slowest multiprocessor's time, or of DRAM's if that is longer

A multiprocessor's CTAs take their tiles in the order of the list. A step of two CTAs that run side by side is as long
as their bytes from L2 (L2_BYTES_US) or as a step of one CTA alone (STEP_US, STEP_SLOT_US), whichever is longer. The
constants were fitted to a run of narrow tiles; the measured time is printed for cases that were measured by shape of
work tiles (`results/experts_h200.json`). Narrow tiles are within 6 % of it; pairs took up to 13 % longer than
estimated. Wide tiles take less: their constants and measured times are from a kernel that converted no codes
ahead (`results/experts_prefill_h200.json` has newer times). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import torch
from lib.experts_inputs import MODELS, Model, inputs
from lib.experts_sm90_static import SHAPES, estimate, measured_us

from dsv4_kernels.moe.sm90 import launch


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="flash")
    parser.add_argument("--slices", default="1")
    parser.add_argument("--routing", default="six,zipf,uniform")
    parser.add_argument("--tokens", default="16,64,128,256,1024")
    options = parser.parse_args()
    measured, rows = measured_us(), []
    print(f"{'case':24} {'shape':8} {'tiles':>7} {'most':>5} {'KB':>7} {'us':>8} {'measured':>9}")
    for name in options.models.split(","):
        for ranks in map(int, options.slices.split(",")):
            model = Model(MODELS[name].experts, MODELS[name].d, MODELS[name].channels // ranks)
            for routing in options.routing.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    ids = inputs(model, tokens, routing, 0, torch.device("cpu")).experts
                    slots = torch.bincount(ids.flatten(), minlength=model.experts).tolist()
                    taken = launch.shape_for(*ids.shape, model.experts, 2 * model.channels // launch.TILE_ROWS)
                    case = f"{name}{'' if ranks == 1 else f'-tp{ranks}'}-{routing}-t{tokens}"
                    for shape_name, shape in SHAPES.items():
                        found = estimate(slots, model, shape)
                        rows.append({"case": case, "shape": shape_name, "taken": shape is taken, **vars(found)})
                        us = f"{measured[case, shape_name]:9.1f}" if (case, shape_name) in measured else f"{'':9}"
                        print(
                            f"{case:24} {shape_name:8} {found.tiles:7} {found.most_tiles:5} "
                            f"{found.most_bytes / 1e3:7,.0f} {found.us:8.1f} {us}{' taken' if shape is taken else ''}"
                        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
