#include "alltoallv_kernel.h"

#include <cstring>
#include <numeric>

namespace standin {
namespace {

constexpr int64_t kMaxExperts = 32;
constexpr int64_t kMaxRanks = 128;
constexpr int64_t kMaxColumns = 65535;

using Counts = std::vector<int64_t>;

// Rows as bytes: a communicator moves them without a look.
struct Rows {
  int64_t row_bytes;
  std::vector<char> bytes;

  Rows(int64_t rows, int64_t row_bytes) : row_bytes(row_bytes), bytes(static_cast<size_t>(rows * row_bytes)) {}
  char* row(int64_t index) {
    return bytes.data() + index * row_bytes;
  }
  const char* row(int64_t index) const {
    return bytes.data() + index * row_bytes;
  }
};

int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// By rank and then by expert, as the counts are, or by expert and then by rank.
enum class Order { ByRank, ByExpert };

// The first row of each block, for the block rank * experts + expert, if blocks follow each other in that order.
Counts starts(const Counts& counts, int64_t experts, Order order) {
  const auto blocks = static_cast<int64_t>(counts.size());
  const int64_t ranks = blocks / experts;
  Counts first(counts.size());
  int64_t next = 0;
  for (int64_t place = 0; place < blocks; ++place) {
    const int64_t block = order == Order::ByRank ? place : place % ranks * experts + place / ranks;
    first[block] = next;
    next += counts[block];
  }
  return first;
}

Rows reordered(const Rows& rows, const Counts& counts, int64_t experts, Order from, Order to) {
  Rows result(sum(counts), rows.row_bytes);
  const Counts source = starts(counts, experts, from);
  const Counts target = starts(counts, experts, to);
  for (size_t block = 0; block < counts.size(); ++block) {
    const auto bytes = static_cast<size_t>(counts[block] * rows.row_bytes);
    std::memcpy(result.row(target[block]), rows.row(source[block]), bytes);
  }
  return result;
}

Rows read(const aclTensor& matrix) {
  const int64_t size = item_size(matrix.dtype);
  Rows rows(matrix.dim(0), matrix.dim(1) * size);
  const char* first = first_element(matrix);
  for (int64_t row = 0; row < matrix.dim(0); ++row) {
    for (int64_t column = 0; column < matrix.dim(1); ++column) {
      const int64_t offset = row * matrix.strides[0] + column * matrix.strides[1];
      std::memcpy(rows.row(row) + column * size, first + offset * size, static_cast<size_t>(size));
    }
  }
  return rows;
}

void write(const aclTensor& matrix, const Rows& rows) {
  if (!rows.bytes.empty()) {
    std::memcpy(first_element(matrix), rows.bytes.data(), rows.bytes.size());
  }
}

// The rows of each group times the group's matrix of `weight` (groups, K, N), (groups, N, K) if transposed.
Rows multiplied(const Rows& rows, const Counts& groups, const aclTensor& weight, int64_t inner, bool transposed) {
  const Floats factors(weight);
  const int64_t columns = factors.size() / (static_cast<int64_t>(groups.size()) * inner);
  const int64_t size = item_size(weight.dtype);
  Rows result(sum(groups), columns * size);
  std::vector<float> matrix(static_cast<size_t>(inner * columns)); // (N, K)
  std::vector<float> row(static_cast<size_t>(inner));
  int64_t next = 0;
  for (int64_t group = 0; group < static_cast<int64_t>(groups.size()); ++group) {
    for (int64_t i = 0; i < inner * columns && groups[group] > 0; ++i) {
      const int64_t inside = transposed ? i : i % inner * columns + i / inner;
      matrix[i] = factors.get(group * inner * columns + inside);
    }
    for (const int64_t end = next + groups[group]; next < end; ++next) {
      for (int64_t k = 0; k < inner; ++k) {
        row[k] = load_float(weight.dtype, rows.row(next) + k * size);
      }
      for (int64_t column = 0; column < columns; ++column) {
        const float total = std::inner_product(row.begin(), row.end(), matrix.begin() + column * inner, 0.0F);
        store_float(weight.dtype, result.row(next) + column * size, total);
      }
    }
  }
  return result;
}

// S_j: how many rows each expert of this rank has.
Counts group_sizes(const Counts& counts, int64_t experts) {
  Counts sizes(static_cast<size_t>(experts));
  for (size_t block = 0; block < counts.size(); ++block) {
    sizes[block % static_cast<size_t>(experts)] += counts[block];
  }
  return sizes;
}

// What both sides must agree on about the rows between two ranks.
std::string label(const AlltoAllvKernel& op, const Counts& counts, int64_t rank, int64_t row_bytes) {
  std::string text = op.forward ? "AlltoAllvGroupedMatMul" : "GroupedMatMulAlltoAllv";
  text += ", dtype " + std::to_string(op.x.dtype) + ", rows of " + std::to_string(row_bytes) + " bytes for the experts";
  for (int64_t expert = 0; expert < op.experts; ++expert) {
    text += " " + std::to_string(counts[rank * op.experts + expert]);
  }
  return text;
}

// All-to-all of rows ordered by rank.
Rows exchanged(const AlltoAllvKernel& op, const Rows& rows) {
  const std::string box = op.comm->next_fused();
  const auto block_of = [&](const Counts& counts, int64_t rank) {
    const auto first = counts.begin() + rank * op.experts;
    return std::accumulate(first, first + op.experts, int64_t{0}) * rows.row_bytes;
  };
  int64_t sent = 0;
  std::vector<char> own;
  for (int rank = 0; rank < op.comm->size; ++rank) {
    const char* from = rows.bytes.data() + sent;
    const int64_t bytes = block_of(op.send, rank);
    if (rank == op.comm->rank) {
      own.assign(from, from + bytes);
    } else {
      op.comm->send(box, rank, label(op, op.send, rank, rows.row_bytes), from, static_cast<uint64_t>(bytes));
    }
    sent += bytes;
  }
  Rows result(0, rows.row_bytes);
  for (int rank = 0; rank < op.comm->size; ++rank) {
    const auto bytes = static_cast<uint64_t>(block_of(op.recv, rank));
    const auto block =
        rank == op.comm->rank ? own : op.comm->receive(box, rank, label(op, op.recv, rank, rows.row_bytes), bytes);
    result.bytes.insert(result.bytes.end(), block.begin(), block.end());
  }
  return result;
}

// What phase 1 lets pass and a device does not survive.
void check(const AlltoAllvKernel& op) {
  const auto need = [&](bool condition, const std::string& what) {
    if (!condition) {
      die("AlltoAllv with GroupedMatMul: " + what);
    }
  };
  need(op.ep == op.comm->size, "epWorldSize is " + std::to_string(op.ep) + " in a group of another size");
  need(op.experts <= kMaxExperts && op.ep <= kMaxRanks, "more experts or ranks than the kernel has room for");
  need(op.y.dim(1) <= kMaxColumns, "N1 is above what is documented");
  for (const Counts* counts : {&op.send, &op.recv}) {
    for (const int64_t count : *counts) {
      need(count >= 0, "a count is negative");
    }
  }
  const auto own = op.comm->rank * op.experts;
  const auto same = std::equal(
      op.send.begin() + own, op.send.begin() + own + op.experts, op.recv.begin() + own,
      op.recv.begin() + own + op.experts);
  need(same, "what a rank sends to itself is not what it receives from itself");
}

} // namespace

void AlltoAllvKernel::run() const {
  check(*this);
  if (mm_x) {
    write(*mm_y, multiplied(read(*mm_x), {mm_x->dim(0)}, *mm_weight, mm_x->dim(1), trans_mm_weight));
  }
  if (forward) {
    const Rows arrived = exchanged(*this, read(x));
    const Rows permuted = reordered(arrived, recv, experts, Order::ByRank, Order::ByExpert);
    if (permute_out) {
      write(*permute_out, permuted);
    }
    write(y, multiplied(permuted, group_sizes(recv, experts), weight, x.dim(1), trans_weight));
  } else {
    const Rows products = multiplied(read(x), group_sizes(send, experts), weight, x.dim(1), trans_weight);
    write(y, exchanged(*this, reordered(products, send, experts, Order::ByExpert, Order::ByRank)));
  }
}

} // namespace standin
