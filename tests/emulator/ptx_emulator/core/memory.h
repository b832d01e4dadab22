// State spaces and addresses.
//
// Global addresses are host addresses. A shared::cluster address is (rank in cluster) << 24 | offset, so an address
// in the executing CTA is also valid in shared::cta, and clearing bit 24 selects the even CTA of a pair, as on hardware.
// The generic space maps shared and local memory to windows at 2^60 and 2^61.
#pragma once
#include "machine.h"

constexpr u64 kSharedWindow = 1ull << 60;
constexpr u64 kLocalWindow = 2ull << 60;
constexpr u32 kReservedSmem = 1024;         // reserved by the system at the bottom of shared memory (CUDA, sm_90 and later)
constexpr u32 kSmemBytes = 228 * 1024;      // per SM, of which a CTA may use 227 KiB

enum class Space : i64 { Global, Shared, Generic, Local, Param };
enum class Order : i64 { Weak, Relaxed, Acquire, Release, AcquireRelease };

static inline u32 shared_address(u32 rank, u32 offset) { return rank << 24 | offset; }
static inline u32 shared_rank(u32 address) { return address >> 24; }
static inline u32 shared_offset(u32 address) { return address & 0xffffff; }

// The CTA that owns a shared::cluster address; checks that [address, address + bytes) is allocated.
Cta &shared_owner(const Warp &w, const Instruction &in, u32 address, u32 bytes, const char *what);
static inline u8 *shared_data(Cta &c, u32 address) { return c.smem.data() + shared_offset(address); }

// Checks a global access against the launch's registered ranges.
u8 *global_data(const Warp *w, const Instruction *in, u64 address, u64 bytes, bool write, const char *what);

// Checks that lanes which access global memory have executed griddepcontrol.wait, where the launch needs it (griddep.cpp).
void check_waited_for_grid(const Warp &w, const Instruction &in, u32 lanes, u64 address, bool write);

// The target of one lane's access.
struct Location {
  u8 *data;
  Cta *cta;     // set for shared memory
  u32 offset;   // within that CTA
  bool global;
};
Location locate(Warp &w, const Instruction &in, int lane, u64 address, Space space, u32 bytes, bool write);
