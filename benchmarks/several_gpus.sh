#!/bin/sh
# several_gpus.sh FOLDER SECONDS STAGE    one stage of the measurements of several GPUs, on a host that has them
#
# FOLDER gets models, servers, figures, logs and results (STAGE.json). A stage of contenders that has not ended in
# SECONDS ends with status 3: repeat the command, and it goes on. Its servers keep running for the next stage; `stop`
# ends them. The stages bits, exact, transfer, check, kernels and quality begin anew each time.
#
#   bits        tests, two GPUs: graphs of prefills, and sharded rows, change no bit
#   prefill     four GPUs, whole V4-Flash: whether graphs of prefills, and each rank's own rows in them, win
#   decode      the same, decoding; put the contender that won into OURS; CELLS=profile for the kernels of a step
#   pair        two GPUs: the whole model with two ranks, one server after the other
#   published   8,192 tokens in, 1,024 out
#   drafts      the same with DSPARK, ACCEPTED (5.45) tokens a step; CELLS=decode for the step alone
#   flag        the deterministic flag against the default
#   exact       the deterministic flag: answers alone and in batches
#   groups      attention data parallelism, four groups and two of two, against tensor parallelism
#   experts     whole experts a rank, and the exchange of their rows
#   stages      two stages of two ranks against four ranks
#   long        one prompt of 256K tokens; the built-in with context parallelism
#   transfer    two GPUs: prefill and decode on one each beside one server on both, over BACKEND (nixl)
#   check       one GPU: all kernels
#   kernels     one GPU: boundaries by every plan, products of bf16 operands by every tile, the chain of row kernels, the
#               way from a phase to the next
#   quality     four GPUs: KL of the trained checkpoint in every configuration, ours and the built-in; on two GPUs with
#               GPUS=2, without the rows of four ranks
#
# OURS and BUILTIN name the contenders (serve_ab.py --help), REQUESTS the numbers of requests. With TP=2 on four GPUs
# contenders get two GPUs each; use another FOLDER.
set -u
folder=$1 seconds=$2 stage=$3
here=$(cd "$(dirname "$0")/.." && pwd)
tp=${TP:-4} ours=${OURS:-ours} builtin=${BUILTIN:-builtin+marlin}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$here" || exit 1

begin=$(date +%s)

# ab CONTENDERS WORKS [ARGUMENT…]: two contenders fit on four H200s at once. Lists are divided by blanks.
ab() {
    contenders=$1 works=$2
    shift 2
    # shellcheck disable=SC2086
    python3 benchmarks/serve_ab.py --full-size --models "$folder/models" --tp "$tp" --in-turns "$folder/servers" \
        --figures "$folder/figures" --logs "$folder/logs" --out "$folder/$stage.json" \
        --seconds $((seconds - $(date +%s) + begin)) \
        --contenders $contenders --works $works ${REQUESTS:+--requests $REQUESTS} "$@"
}

# models FOLDER [ARGUMENT]: the configs FOLDER/april and FOLDER/dspark of six layers, or with full_size=True of all.
models() {
    python3 -c "import sys, pathlib; sys.path.insert(0, 'benchmarks'); from lib.model_shapes import write_models
write_models(pathlib.Path('$1'), tiny=False, ${2:-})"
}

case $stage in
bits)
    # By node ids: pytest ends with an error if one of them is gone, where `-k` would leave the test out.
    shards=tests/serving/test_cards_gpu.py::test_sharded_rows_and_graphs_have_the_bits_of_all_rows
    timeout "$seconds" python3 -m pytest -x -q -p no:cacheprovider -m gpu \
        "tests/serving/test_switches_gpu.py::test_no_flag_changes_a_bit[graphs of prefills]" \
        "${shards}[attention-disabled]" "${shards}[attention-breakable]"
    ;;
prefill) ab "ours ours+prefill_graphs" prefill && ab "ours+own_rows+prefill_graphs $builtin" prefill ;;
decode) ab "$ours $builtin" "${CELLS:-decode prefill multi_turn}" ;;
pair)
    tp=2
    for contender in $ours $builtin; do
        ab "$contender" "${CELLS:-decode prefill}" || exit
        python3 benchmarks/serve_ab.py --full-size --in-turns "$folder/servers" --stop
    done
    ;;
published) ab "$ours $builtin" 8k_1k ;;
drafts) ab "$ours $builtin" "${CELLS:-decode 8k_1k}" --accepted "${ACCEPTED:-5.45}" ;;
flag) ab "$ours $ours+deterministic" "decode prefill" ;;
groups)
    cells=${CELLS:-decode prefill multi_turn 8k_1k}
    ab "ours ours+dp4" "$cells" && ab "ours+dp2 $builtin+dp4" "$cells"
    ;;
experts) ab "ours ours+ep4" "decode prefill" && ab "ours+dp4+ep4 ours+dp4+ep4+exchange" "decode prefill" ;;
stages) ab "ours ours+tp$((tp / 2))_pp2" "decode prefill" ;;
long) ab "$ours $builtin+prefill_cp" "prefill long" -- --context-length 270336 ;;
exact)
    models "$folder/models" full_size=True
    python3 benchmarks/determinism_gpu.py --model "$folder/models/april" --tp "$tp" --works proof --seconds "$seconds" \
        --logs "$folder/logs" --out "$folder/exact.json" -- --load-format dummy --mem-fraction-static 0.85
    ;;
transfer)
    models "$folder/six_layers"
    timeout "$seconds" python3 benchmarks/bench_disaggregation.py --model "$folder/six_layers/april" \
        --backend "${BACKEND:-nixl}" --logs "$folder" --out "$folder/transfer.json" -- --load-format dummy \
        --context-length 32768 --max-total-tokens 600064 --max-running-requests 64 --chunked-prefill-size 8192
    ;;
check) timeout "$seconds" python3 -m sglang_dsv4.kernel_check --out "$folder/kernel_check" ;;
kernels)
    for name in hyper_connection invariant_linear; do
        timeout "$seconds" python3 "benchmarks/bench_$name.py" --sweep --out "$folder/$name.json" || exit
    done
    timeout "$seconds" python3 benchmarks/bench_row_kernels.py --chain --out "$folder/row_kernels.json" || exit
    timeout "$seconds" python3 benchmarks/bench_handover.py --out "$folder/handover.json"
    ;;
quality)
    export PYTHONPATH="tests/lib:benchmarks:${PYTHONPATH:-}" OMP_NUM_THREADS=8
    [ -e "$folder/wide/config.json" ] || python3 -m train_tiny.widen trained "$folder/wide" || exit
    # Tables are made side by side, since the model is small; a table starts its servers one after the other.
    quality() {
        number=$1 cards=$2 gpus=$3
        shift 3
        CUDA_VISIBLE_DEVICES=$cards timeout "$seconds" python3 benchmarks/quality_table.py "$folder/wide" \
            --gpus "$gpus" --port $((17700 + 2000 * number)) --folder "$folder/quality_$number" \
            --out "$folder/quality_$number.json" --only "$@" &
        tables="$tables $!"
    }
    tables='' failed=0 last=1
    [ "${GPUS:-4}" = 4 ] && last=3
    quality 0 0 1 "ours, Marlin" deterministic NVFP4
    quality 1 1 1 chunks hit
    quality 2 $((last - 1)) 1 EAGLE
    quality 3 $last 1 DSPARK "built-in, Marlin"
    quality 4 0,1 2 "two ranks"
    [ "$last" = 3 ] && quality 5 0,1,2,3 4 "four ranks"
    for table in $tables; do wait "$table" || failed=1; done
    python3 benchmarks/quality_table.py "$folder/wide" --merge "$folder"/quality_?.json --out "$folder/quality.json" &&
        exit $failed
    ;;
stop) python3 benchmarks/serve_ab.py --full-size --in-turns "$folder/servers" --stop ;;
*)
    echo "several_gpus.sh: expected a stage that the head of this file lists; got '$stage'" >&2
    exit 2
    ;;
esac
