// Weights packed for linear_groups.cpp: panels of 32 outputs; in a panel group after group: 32 scales (fp16), 32 offsets (fp16) if
// there are any, then the codes, for each step of four k (4 bits: eight, those of the upper half in the upper nibbles) a quad of bytes
// for each output. Behind the groups 32 factors (fp32): scales and offsets are stored relative to each output's largest, so that fp16
// always has the range.
#pragma once

#include "panels.h"

namespace {

constexpr int64_t kMostGroup = 128, kLeastGroup = 16;

struct GroupShape {
    int64_t n, k, group;
    int32_t bits, zero, has_offsets;

    int64_t groups() const { return k / group; }
    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    int64_t header_bytes() const { return kPanel * (has_offsets ? 4 : 2); }
    int64_t group_bytes() const { return header_bytes() + group * kPanel * bits / 8; }
    int64_t panel_bytes() const { return groups() * group_bytes() + kPanel * 4; }
    bool known() const { return (bits == 4 || bits == 8) && group >= kLeastGroup && group <= kMostGroup && group % 8 == 0 && k % group == 0; }
};

}  // namespace
