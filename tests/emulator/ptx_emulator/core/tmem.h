// Tensor memory: 128 lanes of 512 columns of 32 bits per CTA (PTX ISA "Tensor Memory").
#pragma once
#include "machine.h"
#include "race.h"

constexpr u32 kTmemColumns = 512;
static inline u32 tmem_lane(u32 address) { return address >> 16; }
static inline u32 tmem_column(u32 address) { return address & 0xffff; }
static inline u32 *tmem_row(Cta &c, u32 lane) { return c.tmem.data() + (size_t)lane * kTmemColumns; }

// Checks that [column, column + count) is allocated by this CTA.
void check_tmem_columns(const Warp &w, const Instruction &in, Cta &c, u32 column, u32 count, const char *what);

// Lanes lane .. lane + 30 of a quarter get the contents of the next lane; the last lane keeps its own (tcgen05.shift, and A
// after an MMA with .ashift).
constexpr u32 kShiftColumns = 8;  // 32 bytes
void shift_rows(Cta &c, u32 lane, u32 column, u32 columns);
void track_shift(Warp &w, const Instruction &in, Cta &c, u32 lane, u32 column, u32 columns, const race::Actor &a, const char *what);
