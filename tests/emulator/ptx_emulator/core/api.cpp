// The C interface that program.py calls through ctypes.
#include "memory.h"
#include "scheduler.h"
#include "wgmma.h"

extern "C" {

int emu_has_handler(const char *name) { return (int)handlers().count(name); }

// One row per instruction: guard, line, operand count, first operand, kAux auxiliaries.
constexpr int kColumns = 4 + kAux;

void *emu_program(u32 count, const char *const *names, const i64 *table, const u32 *operands, u32 operand_count,
                  const u8 *constants, u32 constant_bytes, const u32 *jumps, u32 jump_count, u32 register_bytes,
                  u32 predicates, u32 local_bytes, u32 static_smem_bytes) {
  auto *p = new Program;
  p->operands.assign(operands, operands + operand_count);
  p->jump_tables.assign(jumps, jumps + jump_count);
  p->constants.assign(constants, constants + constant_bytes);
  p->constants.resize(p->constants.size() + 512);
  p->register_bytes = register_bytes;
  p->predicates = predicates;
  p->local_bytes = local_bytes;
  p->static_smem_bytes = static_smem_bytes;
  for (u32 i = 0; i < count; i++) {
    const i64 *t = table + (size_t)i * kColumns;
    Instruction in{};
    std::string name = names[i];
    if (name == "bra") {
      in.kind = Kind::Branch;
    } else if (name == "brx") {
      in.kind = Kind::BranchIndexed;
    } else if (name == "exit") {
      in.kind = Kind::Exit;
    } else {
      auto it = handlers().find(name);
      if (it == handlers().end()) {
        delete p;
        return nullptr;
      }
      in.run = it->second.run;
      in.kind = it->second.kind;
    }
    p->uses_tmem |= name.rfind("tcgen05", 0) == 0;
    in.guard = (u32)t[0];
    in.line = (i32)t[1];
    in.operand_count = (u16)t[2];
    in.destinations = (u16)(name.rfind("unpack", 0) == 0 ? in.operand_count - 1 : 1);
    in.op = p->operands.data() + t[3];
    in.index = i;
    for (int k = 0; k < kAux; k++) in.aux[k] = t[4 + k];
    p->code.push_back(in);
  }
  mark_wgmma_registers(*p);
  return p;
}
void emu_program_free(void *p) { delete static_cast<Program *>(p); }

struct ProgramArguments {
  const void *program;
  u64 dynamic_smem;
  u32 cluster[3], pad;
  u64 *executions, *lane_executions, *blocked;  // one for each instruction: results
};
struct GridArguments {
  u32 device, dependent, program;  // program: place in the array
  u32 size[3], block[3];
  u32 late;  // its GPU starts nothing while anything else can run
  const u8 *params;
  u64 params_bytes, left_out_from, left_out_to;
};
struct LaunchArguments {
  u64 schedule, seed, max_instructions;
  const ProgramArguments *programs;
  u64 program_count;
  const GridArguments *grids;  // of a GPU in the order of its stream
  u64 grid_count;
  const u64 *ranges;  // begin, end, 1: writable + 2: constant
  const char *const *range_names;
  u64 range_count;
  u32 check_global, track_order;
  u8 level[32];
  u32 multiprocessors;
};
struct LaunchResult {
  i32 failed, kind, line, warp;
  u32 cta[3];
  u32 program;  // that failed
  double counters[16];
};

static std::string g_message, g_warnings, g_shapes;

int emu_launch(const LaunchArguments *a, LaunchResult *r) {
  machine = Machine();
  Machine &m = machine;
  for (u64 k = 0; k < a->program_count; k++) {
    const ProgramArguments &p = a->programs[k];
    Running running;
    running.program = static_cast<const Program *>(p.program);
    for (int d = 0; d < 3; d++) running.cluster_shape[d] = p.cluster[d];
    running.dynamic_smem = p.dynamic_smem;
    for (auto *counts : {&running.executions, &running.lane_executions, &running.blocked})
      counts->assign(running.program->code.size(), 0);
    m.running.push_back(std::move(running));
  }
  m.schedule = (Schedule)a->schedule;
  m.random_state = a->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  m.limit = a->max_instructions;
  m.check_global = a->check_global;
  m.track_order = a->track_order;
  m.multiprocessors = a->multiprocessors;
  u64 clusters = 0;
  for (u64 k = 0; k < a->grid_count; k++) {
    const GridArguments &g = a->grids[k];
    Grid grid;
    grid.device = g.device;
    grid.running = g.program;
    grid.dependent = g.dependent;
    grid.params = g.params;
    grid.first_sequence = (u32)clusters;
    grid.clusters = 1;
    for (int d = 0; d < 3; d++) grid.size[d] = g.size[d], grid.block[d] = g.block[d], grid.clusters *= g.size[d] / a->programs[g.program].cluster[d];
    grid.left_out_from = g.left_out_from;
    grid.left_out_to = g.left_out_to;
    if (!grid.left_out_from) grid.started = grid.left_out_to;
    clusters += grid.clusters;
    m.grids.push_back(grid);
    if (m.gpus.size() <= g.device) m.gpus.resize(g.device + 1);
    m.gpus[g.device].grids.push_back((u32)k);
    m.gpus[g.device].late |= g.late;
  }
  for (int k = 0; k < (int)ErrorKind::Count; k++) m.level[k] = (Level)a->level[k];
  for (u64 k = 0; k < a->range_count; k++)
    m.ranges.push_back({a->ranges[3 * k], a->ranges[3 * k + 1], (a->ranges[3 * k + 2] & 1) != 0,
                        (a->ranges[3 * k + 2] & 2) != 0, a->range_names[k]});
  if (m.check_global)
    for (u64 k = 0; k < a->grid_count; k++) {
      u64 params = (u64)a->grids[k].params;
      m.ranges.push_back({params, params + a->grids[k].params_bytes, false, true, "kernel parameters"});
    }
  std::sort(m.ranges.begin(), m.ranges.end(), [](auto &x, auto &y) { return x.begin < y.begin; });
  memset(r, 0, sizeof *r);
  g_message.clear();
  try {
    run_grids();
  } catch (const Failure &f) {
    r->failed = 1;
    r->kind = (i32)f.kind;
    r->line = f.line;
    r->warp = f.warp;
    r->program = (u32)(m.now - m.running.data());
    for (int k = 0; k < 3; k++) r->cta[k] = f.cta[k];
    g_message = f.text;
  }
  m.active.clear();
  m.locations.clear();
  m.global_shadow.clear();
  m.last_page = ~0ull;
  for (u64 k = 0; k < a->program_count; k++) {
    const Running &running = m.running[k];
    size_t bytes = running.program->code.size() * sizeof(u64);
    memcpy(a->programs[k].executions, running.executions.data(), bytes);
    memcpy(a->programs[k].lane_executions, running.lane_executions.data(), bytes);
    memcpy(a->programs[k].blocked, running.blocked.data(), bytes);
  }
  const Counters &c = m.counters;
  double values[] = {(double)m.executed, (double)c.global_read, (double)c.global_written, (double)c.shared_read,
                     (double)c.shared_written, (double)c.tmem_read, (double)c.tmem_written, (double)c.tma_loaded,
                     (double)c.tma_stored, (double)c.dsmem, (double)c.shared_accesses, (double)c.shared_wavefronts,
                     c.mma_flops, (double)c.operands_read};
  memcpy(r->counters, values, sizeof values);
  g_warnings.clear();
  for (size_t k = 0; k < m.running.size(); k++)
    for (auto &[key, value] : m.running[k].warnings)
      g_warnings += std::to_string(k) + "\t" + std::to_string(key.first) + "\t" + std::to_string(key.second) + "\t" +
                    std::to_string(value.second) + "\t" + value.first + "\n";
  g_shapes.clear();
  for (auto &[key, value] : m.shapes) g_shapes += key + "\t" + std::to_string(value) + "\n";
  return r->failed;
}
const char *emu_message() { return g_message.c_str(); }
const char *emu_warnings() { return g_warnings.c_str(); }
const char *emu_shapes() { return g_shapes.c_str(); }

}  // extern "C"
