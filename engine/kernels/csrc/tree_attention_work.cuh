// What the warps of a block are told of its share, in the kernels for few packed rows, where one warpgroup
// finds it for all.
//
// Each kernel lays out a `Work` of its own, of these in any order (another order is other machine code):
//   Piece piece                  the first one
//   int has_piece, has_more      than one, which `run` then finds
//   Run run                      what is left of a share, where the block may have several pieces
//   Parts parts[kMostSequences]  where the parts of all sequences lie, where it has one
//
// Compile-time: ROWS, ONE (one sequence, merged inside).
#pragma once

#include "tree_attention_share.cuh"

constexpr int kMostSequences = 576 / ROWS < 32 ? 576 / ROWS : 32;  // that are merged inside
constexpr int kWorkBytes = 80 + 8 * kMostSequences;                // of a Work

// The first piece, in registers of a warp.
template <class Work>
__device__ __forceinline__ Piece first_piece(const Work& work) {
  Piece piece = work.piece;
  piece.first = uniform(piece.first);
  piece.last = uniform(piece.last);
  return piece;
}

// The next piece, once this block has had so many tiles of its share.
template <class Work>
__device__ __forceinline__ bool next_piece(const Params& p, const Work& work, u32 tiles, Piece& piece) {
  if (ONE || !work.has_more) return false;
  Run run = work.run;
  run.position = run.line.is_padded ? run.end : run.begin + static_cast<int>(tiles);
  return run.next(p, piece);
}
