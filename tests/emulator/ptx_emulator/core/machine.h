// The emulated machine: program, warps, CTAs, clusters, and the state that a launch shares.
#pragma once
#include <cstdarg>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
#include "clock.h"
#include "shadow.h"
#include "types.h"

struct Warp;
struct Cta;
struct Cluster;
struct Machine;
struct Instruction;

// ---- program ---------------------------------------------------------------------------------------------------

// A handler's result for the scheduler.
enum class Step : u8 {
  Done,            // continue with the next instruction
  Blocked,         // nothing done; try the same instruction again later
  Yield,           // done, and other warps should run (a wait whose condition did not hold)
  NeedConvergence  // nothing done; not all participating lanes have arrived
};
using Handler = Step (*)(Warp &, const Instruction &, u32 lanes);

enum class Kind : u8 {
  Plain,
  Move,  // like Plain, and only copies registers
  Sync,
  Branch,
  BranchIndexed,
  Exit
};

// An operand: bit 31 constant pool, bits 30..29 element size (4 << n bytes; 3 = predicate), bit 28 predicate negated,
// low 28 bits byte offset of the 32-lane row (predicate: its index).
using Operand = u32;
constexpr Operand kNone = 0xffffffffu;
static inline u32 operand_offset(Operand o) { return o & 0x0fffffffu; }
static inline bool operand_is_predicate(Operand o) { return (o >> 29 & 3) == 3; }
static inline u32 operand_bytes(Operand o) { return 4u << (o >> 29 & 3); }
constexpr Operand kTruePredicate = 3u << 29;  // predicate 0 is constantly true

constexpr int kAux = 10;
constexpr i64 kTimerRegister = 42;           // %globaltimer in the decoder's SPECIAL_REGISTERS
constexpr u64 kTimerStart = 1ull << 40;      // nanoseconds at the start of a launch
struct Instruction {
  Handler run;
  Kind kind;
  u16 operand_count;
  u16 destinations;  // of a Move: how many of the first operands it writes
  Operand guard;
  const Operand *op;
  i32 line;
  u32 index;
  i64 aux[kAux];
  enum : u8 { kNo, kMoves, kUnpacks, kUses } wgmma_registers;  // how it uses registers of any wgmma.mma_async
};

struct Program {
  std::vector<Instruction> code;
  std::vector<Operand> operands;
  std::vector<u32> jump_tables;
  std::vector<u8> constants;
  u32 register_bytes = 0, predicates = 0, local_bytes = 0, static_smem_bytes = 0;
  bool uses_tmem = false;  // contains a tcgen05 instruction
};

// ---- errors ----------------------------------------------------------------------------------------------------

// Same order as ErrorKind in errors.py.
enum class ErrorKind : u32 {
  Race, ProxyFence, UninitialisedSmem, UninitialisedTmem, OutOfBounds, TmemOverlap, DivergentCollective,
  MisalignedDescriptor, Misaligned, TxCount, TmemLeak, Deadlock, IllegalInstruction, Mbarrier, Barrier, ExitedCta,
  TmemWait, Trap, InstructionLimit, Internal, TmemFreed, TensorFence, WgmmaFence, WgmmaWait, AsyncWriteFence,
  MbarrierInitFence, GlobalRace, LaneRace, GridDependency, Count
};
enum class Level : u8 { Off, Warn, Error };

struct Failure {
  ErrorKind kind;
  std::string text;
  i32 line;
  i32 warp;
  u32 cta[3];
};

// ---- asynchronous work -----------------------------------------------------------------------------------------

struct AsyncOp {
  std::function<void()> effect;
  const char *what = "";
  i32 line = 0;
  bool done = false;
  void complete() {
    if (done) return;
    done = true;
    effect();
    effect = nullptr;
  }
};
using AsyncPtr = std::shared_ptr<AsyncOp>;

// ---- warps -----------------------------------------------------------------------------------------------------

// Lanes that share a program counter. `ticket` is nonzero while the group waits inside a blocking barrier.
struct Group {
  u32 pc, mask;
  bool waiting_to_converge;
  u64 ticket;
  bool waited = false;  // during this turn of its warp
};

// Groups of asynchronous operations that a thread closes with commit_group and waits for with wait_group.
struct BulkGroups {
  std::vector<AsyncPtr> open;
  u32 open_event = 0;
  struct Closed {
    std::vector<AsyncPtr> ops;
    u32 event;
  };
  std::deque<Closed> closed;
};

// See lanes.h. Arrays are indexed by stream of the warp's own accesses.
struct LaneOrder {
  u32 met[kWarpAgents] = {};       // the last event that all lanes are ordered after
  u32 last[kWarpAgents] = {};      // the last access
  u32 accessed[kWarpAgents] = {};  // lanes with an access after `met`
  struct Handover {  // `lanes` released or issued an operation without the right to publish events in (met, known]
    u32 stream, met, known;
    i32 line;
    u32 lanes;
  };
  std::deque<Handover> handovers;  // the latest ones, for messages
};

struct Warp {
  ~Warp();
  Cta *cta = nullptr;
  u32 index = 0;                      // within the CTA
  u32 global_index = 0;               // within the cluster
  u8 *base[2] = {nullptr, nullptr};   // registers, constants
  std::vector<u32> predicate;
  std::vector<u8> local;
  std::vector<Group> groups;
  u32 current = 0;
  u32 exited = 0;
  const Instruction *executing = nullptr;  // executed by `lanes`
  u32 lanes = 0;
  bool finished = false;
  u64 executed = 0;
  i64 executed_at_yield = 0;  // `executed` at its last unsuccessful wait
  u32 registers = 0;                  // per thread, after the last setmaxnreg; 0 before the first
  u32 waited_for_grid = 0;            // lanes that have executed griddepcontrol.wait

  // happens-before state
  ClockPair now;          // the events that this warp knows
  // The events published by its release fences of this scope or a wider one (for .relaxed arrivals and stores).
  ClockPair released[kScopes];
  HandedOn released_copy;  // copies of `released`, shared by all its relaxed stores; made on demand
  // The events that .relaxed waits and loads saw, by relation of the writer: same CTA, same cluster, another cluster, another
  // GPU. An acquire fence of that scope or a wider one joins them into `now`.
  ClockPair to_acquire[kScopes];
  // Its last strong load: a polling loop repeats it and learns nothing new until a warp stores to the location.
  struct {
    const void *location = nullptr;
    u64 version = 0;
    bool relaxed = false;
    Scope scope = kCtaScope;
  } acquired;
  ClockPair pipe;         // start clocks of all operations in its tensor pipe
  Clock tensor_published; // covered by its last tcgen05.fence::before_thread_sync
  Clock tensor_seen;      // acquired at barriers, usable after the next tcgen05.fence::after_thread_sync
  u32 events[kWarpAgents] = {};
  LaneOrder lane_order;
  Agent agent(WarpAgent k) const { return global_index * kWarpAgents + k; }

  // asynchronous work in program order
  std::deque<AsyncPtr> tensor_pipe;
  struct PendingTmem {
    AsyncPtr op;
    bool is_load;
    u32 event;
  };
  std::deque<PendingTmem> tmem_pending;
  std::deque<AsyncPtr> cp_async_pending;
  std::map<int, BulkGroups> bulk_groups;      // by lane
  std::map<int, BulkGroups> cp_async_groups;  // key 0 only: all lanes of the warp execute them together
  std::shared_ptr<struct WgmmaOfWarp> wgmma;  // set by its first wgmma instruction
  std::vector<Agent> slots;                   // agents of this warp's TMA loads

  std::vector<u32> pending_loads;             // registers that a tcgen05.ld writes (async.cpp)

  u64 cluster_arrivals = 0, cluster_waits = 0;
  struct {
    u32 address = 0, phase = 0;
    i32 line = -1;
  } last_wait;                                // for the deadlock dump
};

// ---- shared structures -----------------------------------------------------------------------------------------

struct NamedBarrier {
  u32 arrived = 0, expected = 0;
  bool everyone = false;
  u64 generation = 0;
  u32 true_lanes = 0, lanes = 0, last_true_lanes = 0, last_lanes = 0;
  i32 line = 0;
  ClockPair gathering, complete;
};

struct Mbarrier {
  u32 pending = 0, expected = 0;
  i64 tx = 0;
  u32 phase = 0;
  bool live = false;
  Agent init_agent = 0;
  u32 init_event = 0;
  i32 init_line = 0;
  ClockPair gathering, complete;
  ClockPair gathering_from_peers, complete_from_peers;  // from other CTAs of the cluster
  Clock executed, executed_complete;  // events before explicit complete_tx, which orders no memory: only for checks at CTA exit
};

struct TmemAllocation {
  u32 column, columns;
  i32 line;
  i32 warp;
  Agent agent = 0;  // with `event`: the allocation
  u32 event = 0;
};

struct Cta {
  Cta();
  ~Cta();
  Cta(Cta &&) noexcept;
  Cluster *cluster = nullptr;
  u32 rank = 0;
  u32 id[3] = {0, 0, 0};
  std::vector<u8> smem;
  std::vector<u32> tmem;  // [lane][column]
  std::unique_ptr<Shadow> smem_shadow, tmem_shadow;
  std::unordered_map<u32, Mbarrier> mbarriers;  // keyed by shared-memory offset
  NamedBarrier barriers[16];
  std::vector<TmemAllocation> tmem_allocations, tmem_freed;
  bool tmem_permit = true;
  bool waited_for_grid = false;          // some thread has waited, see griddep.cpp
  bool lets_next_grid_in = false;        // some thread has executed griddepcontrol.launch_dependents
  std::vector<std::pair<Agent, u32>> pair_allocations;  // events of its tcgen05.alloc.cta_group::2, in program order
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::shared_ptr<struct Warpgroup>> warpgroups;  // if it uses wgmma; index: warp / 4
  u32 live_warps = 0;
  i64 registers_given_back = 0;          // freed by setmaxnreg.dec for setmaxnreg.inc: registers per thread, summed over warps
  Clock remote_accesses;                 // accesses to this CTA's memory by agents of its peers
  std::map<Agent, i32> remote_lines;     // the line of each agent's last such access
  struct RemoteCommit {
    u32 event;
    i32 line;
  };
  std::map<Agent, RemoteCommit> remote_commits;  // the last tcgen05.commit of each peer's tensor pipe to an mbarrier of this CTA
  Clock exit_clock;                      // the events that its warps knew when they exited
  u64 counters[16] = {};
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  struct Grid *grid = nullptr;
  u32 sequence = 0;
  std::unordered_map<u64, AsyncPtr> in_flight;  // its stores that no other GPU sees yet, by the address of the word
  u64 barrier_generation = 0;
  // Indexed by the parity of the generation: warps may arrive for the next generation before others arrive for this one.
  ClockPair barrier_gathering[2], barrier_complete[2];
  Clock barrier_executed[2], barrier_executed_complete[2];  // events before any arrival, also .relaxed: only for checks at CTA exit
  std::vector<Warp *> live;
  std::vector<AsyncPtr> free_running;  // TMA loads, bulk copies: no order among themselves
  u32 next_slot = 0;                   // number of agents allocated after the warps' fixed ones
  std::vector<u32> slot_events;
  u32 warp_count = 0;
};

struct GlobalRange {
  u64 begin, end;
  bool writable;
  bool constant;  // no grid that may still run writes it: readable before griddepcontrol.wait
  std::string name;
};

// A program that grids of this launch run, with the shape that they share, its counters and its warnings.
struct Running {
  const Program *program = nullptr;
  u32 cluster_shape[3] = {1, 1, 1};
  u64 dynamic_smem = 0;
  std::vector<u64> executions, lane_executions, blocked;
  std::map<std::pair<u32, i32>, std::pair<std::string, u64>> warnings;
};

// One launch of a program.
struct Grid {
  u32 device = 0;
  u32 running = 0;  // its place in Machine::running
  u32 size[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  const u8 *params = nullptr;
  bool dependent = false;                      // launched with programmatic stream serialization
  u32 first_sequence = 0;                      // sequence number of its first cluster
  u64 clusters = 0, started = 0;               // x fastest; started, or canceled by clusterlaunchcontrol for a running cluster
  u64 left_out_from = ~0ull, left_out_to = 0;  // clusters [from, to) never start
  u32 threads() const { return block[0] * block[1] * block[2]; }
  // Counts the next cluster as started, and returns its number.
  u64 next_cluster() {
    u64 number = started++;
    if (started == left_out_from) started = left_out_to;
    return number;
  }
  // The id of the first CTA of a cluster.
  void first_cta(u64 cluster, u32 *id) const;
};

// A GPU: its grids run one after the other, as in one stream.
struct Gpu {
  std::vector<u32> grids;  // places in Machine::grids
  size_t current = 0;
  u32 resident = 0;            // clusters
  bool late = false;           // starts nothing while anything else can run
  std::map<u32, Clock> known;  // the events that its completed grids know, by sequence number of the cluster
};

// The clocks that one warp published by its strong stores to a location.
struct Published {
  u32 cluster, warp, device;
  HandedOn handed;
};
struct PublishedAt {
  std::vector<Published> stores;
  u64 version = 0;  // counts the changes
};

enum class Schedule : u32 { Eager, Random, Late, RandomWarps };

// Counters of one launch; Python turns them into the report.
struct Counters {
  u64 global_read = 0, global_written = 0, shared_read = 0, shared_written = 0, tmem_read = 0, tmem_written = 0;
  u64 tma_loaded = 0, tma_stored = 0, dsmem = 0;
  u64 operands_read = 0;  // shared memory, by tcgen05.mma and cp
  u64 shared_accesses = 0, shared_wavefronts = 0;
  double mma_flops = 0;
};

struct Machine {
  std::vector<Running> running;
  Running *now = nullptr;  // of the cluster whose turn it is
  const Program *program = nullptr;  // of `now`, like the next two
  u32 cluster_shape[3];
  u64 dynamic_smem = 0;
  std::vector<Grid> grids;
  std::vector<Gpu> gpus;
  Schedule schedule = Schedule::Eager;
  u64 random_state = 1;
  u64 waited_ns = 0;  // that %globaltimer is ahead, because nothing but waiting was left to do
  u64 progress = 0;  // counts all events that may unblock a warp
  u64 executed = 0, limit = 0;
  Level level[(int)ErrorKind::Count];
  bool track_order = true;
  u32 multiprocessors = 1;  // bound on the resident clusters of a GPU
  std::vector<GlobalRange> ranges;
  bool check_global = false;
  std::map<std::string, u64> shapes;
  Counters counters;
  std::vector<std::unique_ptr<Cluster>> active;
  // Happens-before across the launch: strong stores by location, and the shadow of global memory by page.
  std::unordered_map<const void *, PublishedAt> locations;
  std::unordered_map<u64, std::unique_ptr<Shadow>> global_shadow;
  u64 last_page = ~0ull;  // key of last_page_shadow
  Shadow *last_page_shadow = nullptr;

  // Makes a grid's program the one whose turn it is.
  void enter(const Grid &grid) {
    now = &running[grid.running];
    program = now->program;
    dynamic_smem = now->dynamic_smem;
    for (int k = 0; k < 3; k++) cluster_shape[k] = now->cluster_shape[k];
  }
  u64 random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
  }
  bool deferring() const { return schedule == Schedule::Random || schedule == Schedule::Late; }
  bool random_order() const { return schedule != Schedule::Eager; }
};
extern Machine machine;

[[noreturn]] void fail(ErrorKind kind, const Warp *w, const Instruction *in, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
// Raises an error, records a warning, or does nothing, depending on the launch's checks.
void report(ErrorKind kind, const Warp *w, const Instruction *in, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void warn(ErrorKind kind, const Instruction *in, const std::string &text);

// ---- operands --------------------------------------------------------------------------------------------------

template <class T>
static inline T *row(Warp &w, Operand o) {
  return reinterpret_cast<T *>(w.base[o >> 31] + operand_offset(o));
}
static inline u32 predicate_of(const Warp &w, Operand o) {
  u32 v = w.predicate[operand_offset(o)];
  return (o >> 28 & 1) ? ~v : v;
}
static inline void set_predicate(Warp &w, Operand o, u32 lanes, u32 bits) {
  if (o == kNone) return;
  u32 &p = w.predicate[operand_offset(o)];
  p = (p & ~lanes) | (bits & lanes);
}
// A value that must be equal in all participating lanes: that of the lowest lane.
template <class T>
static inline T uniform(Warp &w, Operand o, u32 lanes) {
  return row<T>(w, o)[first_lane(lanes)];
}
static inline u64 lane_address(Warp &w, Operand o, int lane, i64 offset) {
  if (operand_bytes(o) == 4) return (u32)(row<u32>(w, o)[lane] + (u32)offset);
  return row<u64>(w, o)[lane] + (u64)offset;
}

// ---- handler registry ------------------------------------------------------------------------------------------

struct HandlerEntry {
  Handler run;
  Kind kind;
};
std::unordered_map<std::string, HandlerEntry> &handlers();
struct RegisterHandler {
  RegisterHandler(const char *name, Kind kind, Handler run) { handlers()[name] = {run, kind}; }
};
#define EMU_CONCAT2(a, b) a##b
#define EMU_CONCAT(a, b) EMU_CONCAT2(a, b)
// HANDLER("name", Plain) { ... return Step::Done; }   with w, in, lanes in scope
#define HANDLER_IMPL(id, name, kind)                                                  \
  static Step EMU_CONCAT(handler_, id)(Warp & w, const Instruction &in, u32 lanes);   \
  static RegisterHandler EMU_CONCAT(register_, id)(name, Kind::kind, EMU_CONCAT(handler_, id)); \
  static Step EMU_CONCAT(handler_, id)([[maybe_unused]] Warp & w, [[maybe_unused]] const Instruction &in, \
                                       [[maybe_unused]] u32 lanes)
#define HANDLER(name, kind) HANDLER_IMPL(__COUNTER__, name, kind)
