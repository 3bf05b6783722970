// Reads a binary twin (layout: README.md), recomputes O of plain problems in double, and compares.
//   g++ -std=c++17 -O1 -o read read.cpp && ./read vectors/ordinary.bin
// One line per problem: id, |largest difference from the expected O|, O[0] as float64 bits.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

enum Format : uint8_t { FP64, FP32, FP16, BF16, E4M3, E5M2, BOOL, INT64 };

struct Tensor {
  Format format;
  std::vector<uint32_t> shape;
  std::vector<double> values;  // every format's values are doubles
};

struct Problem {
  std::string id;
  std::map<std::string, Tensor> tensors;
};

// A small float from its code: exponent bits e, fraction bits f. Only e5m2, fp16 and wider have infinities.
static double decode(uint32_t code, int e, int f, bool infinities) {
  const uint32_t exponent = (code >> f) & ((1u << e) - 1), fraction = code & ((1u << f) - 1);
  const int bias = (1 << (e - 1)) - 1;
  const double sign = (code >> (e + f)) & 1 ? -1.0 : 1.0;
  const bool top = exponent == (1u << e) - 1;
  if (top && (infinities || fraction == (1u << f) - 1)) return infinities && !fraction ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - f);
  return sign * std::ldexp(fraction + (1u << f), static_cast<int>(exponent) - bias - f);
}

class Reader {
 public:
  explicit Reader(std::vector<char> bytes) : bytes_(std::move(bytes)) {}

  template <class T>
  T take() {
    T x;
    if (at_ + sizeof(T) > bytes_.size()) throw std::runtime_error("the file ends early");
    std::memcpy(&x, bytes_.data() + at_, sizeof(T));  // the host must be little-endian
    at_ += sizeof(T);
    return x;
  }
  std::string text() {
    std::string s(take<uint16_t>(), ' ');
    for (char& c : s) c = take<char>();
    return s;
  }
  double value(Format format) {
    switch (format) {
      case FP64: return take<double>();
      case FP32: return take<float>();
      case FP16: return decode(take<uint16_t>(), 5, 10, true);
      case BF16: return decode(take<uint16_t>(), 8, 7, true);
      case E4M3: return decode(take<uint8_t>(), 4, 3, false);
      case E5M2: return decode(take<uint8_t>(), 5, 2, true);
      case BOOL: return take<uint8_t>();
      default: return static_cast<double>(take<int64_t>());
    }
  }
  std::vector<Problem> problems() {
    if (take<uint64_t>() != 0x0A31444C4F474346u) throw std::runtime_error("not a golden file");  // "FCGOLD1\n"
    std::vector<Problem> all(take<uint32_t>());
    for (Problem& p : all) {
      p.id = text();
      for (uint32_t n = take<uint32_t>(); n; --n) {
        Tensor& t = p.tensors[text()];
        t.format = static_cast<Format>(take<uint8_t>());
        t.shape.resize(take<uint8_t>());
        size_t count = 1;
        for (uint32_t& size : t.shape) count *= size = take<uint32_t>();
        take<uint32_t>();  // bytes that follow
        t.values.resize(count);
        for (double& x : t.values) x = value(t.format);
      }
    }
    return all;
  }

 private:
  std::vector<char> bytes_;
  size_t at_ = 0;
};

// O of one problem without options: shapes (batch, heads, length, dim).
static std::vector<double> attention(Problem& p) {
  const Tensor &q = p.tensors["q"], &k = p.tensors["k"], &v = p.tensors["v"];
  const double scale = p.tensors["effective_scale"].values[0];
  const size_t B = q.shape[0], H = q.shape[1], N = q.shape[2], D = q.shape[3];
  const size_t G = H / k.shape[1], M = k.shape[2], E = v.shape[3];
  std::vector<double> out(B * H * N * E);
  for (size_t row = 0; row < B * H * N; ++row) {
    const size_t key = (row / N) / G * M;  // B * H / G key heads, in order
    std::vector<double> s(M);
    double m = -INFINITY, l = 0;
    for (size_t j = 0; j < M; ++j) {
      for (size_t c = 0; c < D; ++c) s[j] += q.values[row * D + c] * k.values[(key + j) * D + c];
      m = std::max(m, s[j] *= scale);
    }
    for (double& x : s) l += x = std::exp(x - m);
    for (size_t j = 0; j < M; ++j)
      for (size_t c = 0; c < E; ++c) out[row * E + c] += s[j] / l * v.values[(key + j) * E + c];
  }
  return out;
}

int main(int argc, char** argv) {
  const std::set<std::string> options{"mask", "bias",   "alibi_slopes", "sink",        "softcap",    "causal",
                                      "window", "key_lengths", "cu_seqlens_q", "v_descale"};
  try {
    for (int i = 1; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) throw std::runtime_error(std::string("cannot open ") + argv[i]);
      Reader reader({std::istreambuf_iterator<char>(file), {}});
      for (Problem& p : reader.problems()) {
        const std::vector<double>& expected = p.tensors["out.fp64"].values;
        const bool plain = std::none_of(p.tensors.begin(), p.tensors.end(),
                                        [&](const auto& item) { return options.count(item.first) > 0; });
        double worst = -1;  // not recomputed
        if (plain && !expected.empty() && p.tensors["k"].shape[2]) {
          const std::vector<double> out = attention(p);
          worst = 0;
          for (size_t n = 0; n < out.size(); ++n) worst = std::fmax(worst, std::fabs(out[n] - expected[n]));
        }
        uint64_t bits = 0;
        if (!expected.empty()) std::memcpy(&bits, expected.data(), 8);
        std::printf("%s %.3g %016" PRIx64 "\n", p.id.c_str(), worst, bits);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
