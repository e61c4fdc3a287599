#include "src/train/timeline_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/error.h"

namespace speedrun {
namespace {

constexpr const char* kNormSymbol =
    "_ZN8speedrun7kernels39_GLOBAL__N__88a256ad_7_norm_cu_37ffedca19norm_forward_kernelILi32ELi1EEEvNS0_11NormForwardINS_4bf16EEE";
constexpr const char* kNcclSymbol = "_Z40ncclDevKernel_AllReduce_Sum_bf16_RING_LL24ncclDevKernelArgsStorageILm4096EE";
enum NameIndex : uint32_t { kNorm, kGemm, kNccl, kCopy };

constexpr uint64_t kMs = 1'000'000, kStart = 1'700'000'000'000'000'123;  // ns

Activity activity(uint32_t name, double start_ms, double end_ms, uint32_t stream = 7) {
  Activity result;
  result.kind = name == kCopy ? ActivityKind::copy : ActivityKind::kernel;
  result.name = name;
  result.start_ns = kStart + static_cast<uint64_t>(start_ms * kMs);
  result.end_ns = kStart + static_cast<uint64_t>(end_ms * kMs);
  result.stream = stream;
  return result;
}

RankTimeline timeline(std::vector<Activity> activities, int count = 1) {
  RankTimeline result;
  result.label = "NVIDIA H200";
  result.names = {kNormSymbol, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", kNcclSymbol, "copy host to device"};
  result.windows.push_back({.first = 10, .count = count, .stage = 1, .activities = std::move(activities)});
  return result;
}

std::vector<KernelName> names_of(const RankTimeline& timeline) {
  std::vector<KernelName> names;
  for (const std::string& name : timeline.names) names.push_back(kernel_name(name));
  return names;
}

StepTimes times_of(const RankTimeline& timeline) { return step_times(timeline.windows[0], names_of(timeline)); }

// ------------------------------------------------------------ intervals

TEST(IntervalUnion, JoinsOverlapsAndNeighboursAndDropsEmptyOnes) {
  const std::vector<Interval> expected = {{1, 8}, {10, 14}, {20, 21}};
  EXPECT_EQ(interval_union({{10, 12}, {1, 5}, {3, 4}, {5, 8}, {11, 14}, {16, 16}, {20, 21}}), expected);
  EXPECT_TRUE(interval_union({}).empty());
  EXPECT_EQ(total_length(expected), 7 + 4 + 1);
}

TEST(OverlapLength, CountsEveryCommonPiece) {
  EXPECT_EQ(overlap_length({{0, 10}, {20, 30}}, {{5, 25}}), 5 + 5);
  EXPECT_EQ(overlap_length({{0, 100}}, {{1, 2}, {3, 5}, {99, 200}}), 1 + 2 + 1);
  EXPECT_EQ(overlap_length({{1, 2}, {3, 5}, {99, 200}}, {{0, 100}}), 1 + 2 + 1);
  EXPECT_EQ(overlap_length({{0, 10}}, {{10, 20}}), 0);
  EXPECT_EQ(overlap_length({}, {{0, 1}}), 0);
}

// Against counting every nanosecond.
TEST(OverlapLength, AgreesWithCounting) {
  uint32_t random = 1;
  const auto next = [&](uint32_t below) {
    random = random * 1664525 + 1013904223;
    return random / 65536 % below;
  };
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Interval> sets[2];
    std::vector<int> covered(120, 0);
    for (int s = 0; s < 2; ++s) {
      for (uint32_t i = next(8); i > 0; --i) {
        const uint64_t begin = next(100);
        sets[s].push_back({begin, begin + next(20)});
        for (uint64_t t = sets[s].back().first; t < sets[s].back().second; ++t) covered[t] |= 1 << s;
      }
      sets[s] = interval_union(sets[s]);
      EXPECT_EQ(total_length(sets[s]), std::count_if(covered.begin(), covered.end(), [&](int c) { return (c >> s & 1) != 0; }));
    }
    EXPECT_EQ(overlap_length(sets[0], sets[1]), std::count(covered.begin(), covered.end(), 3)) << "trial " << trial;
  }
}

// ------------------------------------------------------------ step times

TEST(StepTimes, WithoutCommunication) {
  const StepTimes times = times_of(timeline({activity(kNorm, 0, 2), activity(kGemm, 3, 9), activity(kNorm, 9, 10)}));
  EXPECT_DOUBLE_EQ(times.length, 10);
  EXPECT_DOUBLE_EQ(times.compute, 9);
  EXPECT_EQ(times.communication, 0);
  EXPECT_EQ(times.uncovered, 0);
  EXPECT_EQ(times.copies_alone, 0);
  EXPECT_DOUBLE_EQ(times.idle, 1);
}

TEST(StepTimes, CommunicationPartlyCovered) {
  // Compute 0-4 and 6-8; communication 3-7 on another stream: 4-6 is uncovered.
  const StepTimes times = times_of(timeline({activity(kGemm, 0, 4), activity(kNorm, 6, 8), activity(kNccl, 3, 7, 13)}));
  EXPECT_DOUBLE_EQ(times.length, 8);
  EXPECT_DOUBLE_EQ(times.compute, 6);
  EXPECT_DOUBLE_EQ(times.communication, 4);
  EXPECT_DOUBLE_EQ(times.uncovered, 2);
  EXPECT_EQ(times.idle, 0);
}

TEST(StepTimes, NestedAndAcrossSeveralStreams) {
  // Compute of two streams overlaps; one collective lies inside it, one inside another collective, one after everything else.
  const StepTimes times = times_of(timeline({activity(kGemm, 0, 10, 7), activity(kNorm, 2, 3, 8), activity(kNorm, 9, 12, 8),
                                             activity(kNccl, 4, 6, 13), activity(kNccl, 15, 20, 13), activity(kNccl, 16, 17, 14)}));
  EXPECT_DOUBLE_EQ(times.length, 20);
  EXPECT_DOUBLE_EQ(times.compute, 12);
  EXPECT_DOUBLE_EQ(times.communication, 2 + 5);
  EXPECT_DOUBLE_EQ(times.uncovered, 5);
  EXPECT_DOUBLE_EQ(times.idle, 3);
}

TEST(StepTimes, CopiesCoverNothing) {
  // A copy during communication does not cover it; alone it counts as itself, during a kernel not at all.
  const StepTimes times =
      times_of(timeline({activity(kCopy, 0, 2), activity(kGemm, 1, 3), activity(kNccl, 4, 6, 13), activity(kCopy, 4, 6)}));
  EXPECT_DOUBLE_EQ(times.length, 6);
  EXPECT_DOUBLE_EQ(times.uncovered, 2);
  EXPECT_DOUBLE_EQ(times.copies_alone, 1);
  EXPECT_DOUBLE_EQ(times.idle, 1);
  EXPECT_DOUBLE_EQ(times.compute + times.uncovered + times.copies_alone + times.idle, times.length);
}

TEST(StepTimes, AreMeansOfTheWindow) {
  const StepTimes times = times_of(timeline({activity(kGemm, 0, 4), activity(kNccl, 4, 6, 13), activity(kGemm, 7, 12)}, 4));
  EXPECT_DOUBLE_EQ(times.length, 3);
  EXPECT_DOUBLE_EQ(times.compute, 9.0 / 4);
  EXPECT_DOUBLE_EQ(times.uncovered, 0.5);
  EXPECT_DOUBLE_EQ(times.idle, 0.25);
}

TEST(StepTimes, OfAnEmptyWindowAreZero) {
  const StepTimes times = times_of(timeline({}));
  EXPECT_EQ(times.length, 0);
  EXPECT_EQ(times.idle, 0);
}

// ------------------------------------------------------------ names

TEST(KernelName, OfOurKernels) {
  const KernelName norm = kernel_name(kNormSymbol);
  EXPECT_EQ(norm.text, "norm_forward_kernel<32, 1>");
  EXPECT_EQ(norm.kind, "norm");
  EXPECT_FALSE(norm.communication);
  // A name that several files have tells the file.
  const KernelName gate = kernel_name(
      "_ZN8speedrun7kernels44_GLOBAL__N__1c6c8e32_11_gate_net_cu_2e9065c214forward_kernelILi128EEEvNS0_14GateNetForwardINS_"
      "4bf16EEEl");
  EXPECT_EQ(gate.text, "gate_net: forward_kernel<128>");
  EXPECT_EQ(gate.kind, "gate_net");
  const KernelName attention = kernel_name(
      "_ZN8speedrun7kernels53_GLOBAL__N__9700cfdb_20_attention_forward_cu_1b9aa0c224attention_forward_kernelILi64EEEvNS0_"
      "16AttentionForwardINS_4bf16EEEf");
  EXPECT_EQ(attention.text, "attention_forward_kernel<64>");
  EXPECT_EQ(attention.kind, "attention");
  const KernelName dc = kernel_name(
      "_ZN8speedrun7kernels56_GLOBAL__N__635cd738_23_dc_attention_forward_cu_79d9a91227dc_attention_forward_kernelINS0_"
      "6DcTileILi64ELi9EEEEEvNS0_18DcAttentionForwardINS_4bf16EEEf");
  EXPECT_EQ(dc.text, "dc_attention_forward_kernel<DcTile<64, 9>>");
  EXPECT_EQ(dc.kind, "DC attention");
  const KernelName up =
      kernel_name("_ZN8speedrun7kernels8relu2_up15relu2_up_kernelINS_4e4m3ELb1EEEv14CUtensorMap_stS4_NS1_6ParamsE");
  EXPECT_EQ(up.text, "relu2_up_kernel<e4m3, true>");
  EXPECT_EQ(up.kind, "matrix products");
}

TEST(KernelName, OfLibraries) {
  EXPECT_EQ(kernel_name("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN").text, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN");
  EXPECT_EQ(kernel_name("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN").kind, "matrix products");
  EXPECT_EQ(kernel_name("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas").kind, "matrix products");
  const KernelName cutlass =
      kernel_name("_ZN7cutlass7Kernel2I68cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8EEvNT_6ParamsE");
  EXPECT_EQ(cutlass.text, "Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu…>");
  EXPECT_EQ(cutlass.kind, "matrix products");
  const KernelName nccl = kernel_name(kNcclSymbol);
  EXPECT_TRUE(nccl.communication);
  EXPECT_EQ(nccl.text, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL");
  EXPECT_EQ(nccl.kind, "NCCL");
  const KernelName sort = kernel_name(
      "_ZN3cub17CUB_300001_SM_9006detail10radix_sort33DeviceRadixSortExclusiveSumKernelINS1_5radix10policy_"
      "hubIjijE10Policy1000EjEEvPT0_");
  EXPECT_EQ(sort.text, "DeviceRadixSortExclusiveSumKernel<Policy1000, unsigned int>");
  EXPECT_EQ(sort.kind, "cub");
  EXPECT_EQ(kernel_name("copy host to device").text, "copy host to device");
  EXPECT_EQ(kernel_name("").text, "");
}

TEST(ShortFunctionName, KeepsWhatTellsKernelsApart) {
  EXPECT_EQ(short_function_name("void a::b::f<int>(int, a::c<float>)"), "f<int>");
  EXPECT_EQ(short_function_name("f(int)"), "f");
  EXPECT_EQ(short_function_name("f"), "f");
  EXPECT_EQ(short_function_name("void a::(anonymous namespace)::f<(bool)0, (a::(anonymous namespace)::Color)2, 4096ul>(int*)"),
            "f<false, 2, 4096ul>");
  EXPECT_EQ(short_function_name("std::pair<int, int> a::f<a::b<c::d, c::e<1> >, float const*>(x)"), "f<b<d, e<1>>, float const*>");
  EXPECT_EQ(
      short_function_name("void f<a::long_name_of_a_template_number_one<1>, a::long_name_of_a_template_number_two<2>, int>(int)"),
      "f<long_name_of_a_template_number_one<1>, …>");
  EXPECT_EQ(short_function_name("void a::f<a::g<a::first_inner_type_that_is_long, a::second_inner_type_that_is_long> >()"),
            "f<g<first_inner_type_that_is_long, …>>");
}

// No demangled name, however odd, is out of bounds.
TEST(ShortFunctionName, SurvivesUnbalancedNames) {
  for (const char* name : {"", "<", ">", "(", ")", "a<", "a<b", "a>", "::", "a::", " ", "a ", "f<>", "f<,>", "f<(>", "f<()>",
                           "(anonymous namespace)::", ">>", "f<(a)>(b"})
    EXPECT_LE(short_function_name(name).size(), 64u) << name;
}

// ------------------------------------------------------------ tables

TEST(TimelineRows, SumCallsAndTimesOfAStep) {
  const RankTimeline recorded = timeline(
      {activity(kNorm, 0, 1), activity(kGemm, 1, 4), activity(kNorm, 4, 5), activity(kNccl, 5, 6), activity(kCopy, 7, 7.5)}, 2);
  const std::vector<TimelineRow> rows = rows_by_kernel(recorded.windows[0], names_of(recorded));
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].name, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN");
  EXPECT_DOUBLE_EQ(rows[0].calls, 0.5);
  EXPECT_DOUBLE_EQ(rows[0].ms, 1.5);
  EXPECT_EQ(rows[1].name, "norm_forward_kernel<32, 1>");
  EXPECT_DOUBLE_EQ(rows[1].calls, 1);
  EXPECT_DOUBLE_EQ(rows[1].ms, 1);
  EXPECT_EQ(rows[2].name, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL");
  EXPECT_EQ(rows[3].name, "copy host to device");
  const std::vector<TimelineRow> kinds = rows_by_kind(recorded.windows[0], names_of(recorded));
  ASSERT_EQ(kinds.size(), 4u);
  EXPECT_EQ(kinds[0].name, "matrix products");
  EXPECT_EQ(kinds[1].name, "norm");
  EXPECT_EQ(kinds[2].name, "NCCL");
  EXPECT_EQ(kinds[3].name, "copies and memory sets");
}

TEST(TimelineTable, FoldsTheRest) {
  const std::vector<TimelineRow> rows = {{"matrix products", 12, 6}, {"f<…>", 2, 2}, {"c", 1.5, 1}, {"d", 1, 0.5}};
  EXPECT_EQ(timeline_table("kind", rows, 10, 2),
            "  kind              calls/step    ms/step   share\n"
            "  matrix products           12      6.000   60.0%\n"
            "  f<…>                       2      2.000   20.0%\n"
            "  2 others                 2.5      1.500   15.0%\n"
            "  sum                     16.5      9.500   95.0%\n");
  EXPECT_EQ(timeline_table("kind", rows, 10, 4).find("others"), std::string::npos);
  EXPECT_NE(timeline_table("kind", {}, 0, 4).find("sum"), std::string::npos);
}

TEST(TimelineText, TellsUncoveredCommunicationOfEveryRank) {
  const RankTimeline first = timeline({activity(kGemm, 0, 4), activity(kNccl, 3, 5, 13)}),
                     second = timeline({activity(kGemm, 0, 4), activity(kNccl, 3, 8, 13)});
  const std::string text = timeline_text({first, second});
  EXPECT_NE(text.find("timeline of step 10 (stage 1), mean of 1 step:"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 0: step 5.000 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("uncovered communication: 1.000 ms of a step, 20.0%"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1: step 8.000 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("uncovered communication: 4.000 ms of a step, 50.0%"), std::string::npos) << text;
  EXPECT_NE(text.find("matrix products"), std::string::npos) << text;
  EXPECT_EQ(timeline_text({first}).find("rank 0"), std::string::npos);
  EXPECT_EQ(timeline_text({}), "");
}

// ------------------------------------------------------------ Chrome trace

nlohmann::json events_of(const nlohmann::json& trace, const std::string& phase) {
  nlohmann::json events = nlohmann::json::array();
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == phase) events.push_back(event);
  }
  return events;
}

std::string track_name(const nlohmann::json& trace, int pid, int tid) {
  for (const auto& event : events_of(trace, "M")) {
    if (event["name"] == "thread_name" && event["pid"] == pid && event["tid"] == tid) return event["args"]["name"];
  }
  return "";
}

TEST(ChromeTrace, IsSortedJsonWithAProcessForEachRankAndATrackForEachStream) {
  Activity kernel = activity(kNorm, 0.5, 1);
  kernel.grid = {132, 2, 1};
  kernel.block = {256, 1, 1};
  kernel.registers = 40;
  kernel.shared_bytes = 1024;
  Activity copy = activity(kCopy, 0, 0.25);
  copy.bytes = 4096;
  const RankTimeline first = timeline({activity(kNccl, 2, 3, 13), kernel, copy, activity(kGemm, 1, 2.5)}),
                     second = timeline({activity(kGemm, 0.75, 2, 9)});
  const nlohmann::json trace = nlohmann::json::parse(chrome_trace({first, second}));
  const nlohmann::json events = events_of(trace, "X");
  ASSERT_EQ(events.size(), 7u);  // with a marker of the window for each rank
  for (size_t i = 1; i < events.size(); ++i) EXPECT_GE(events[i]["ts"].get<double>(), events[i - 1]["ts"].get<double>());
  EXPECT_EQ(events[0]["name"], "step 10");
  EXPECT_EQ(events[0]["ts"], 0.0);
  EXPECT_EQ(events[0]["dur"], 3000.0);
  EXPECT_EQ(events[1]["name"], "copy host to device");
  EXPECT_EQ(events[1]["args"]["bytes"], 4096);
  EXPECT_EQ(events[2]["name"], "norm_forward_kernel<32, 1>");
  EXPECT_EQ(events[2]["ts"], 500.0);
  EXPECT_EQ(events[2]["dur"], 500.0);
  EXPECT_EQ(events[2]["args"]["grid"], "132 x 2 x 1");
  EXPECT_EQ(events[2]["args"]["block"], "256 x 1 x 1");
  EXPECT_EQ(events[2]["args"]["registers"], 40);
  EXPECT_EQ(events[2]["args"]["shared_bytes"], 1024);
  EXPECT_EQ(events[2]["tid"], events[1]["tid"]);
  EXPECT_EQ(events[2]["pid"], 0);
  EXPECT_EQ(track_name(trace, 0, events[2]["tid"]), "stream 7");
  EXPECT_EQ(events[6]["cat"], "NCCL");
  EXPECT_EQ(track_name(trace, 0, events[6]["tid"]), "NCCL, stream 13");
  EXPECT_EQ(events[4]["pid"], 1);
  EXPECT_EQ(track_name(trace, 1, events[4]["tid"]), "stream 9");
  bool named = false;
  for (const auto& event : events_of(trace, "M"))
    named |= event["name"] == "process_name" && event["pid"] == 1 && event["args"]["name"] == "rank 1: NVIDIA H200";
  EXPECT_TRUE(named);
  ASSERT_EQ(trace["otherData"]["windows"].size(), 2u);
  EXPECT_EQ(trace["otherData"]["windows"][0]["first_step"], 10);
  EXPECT_DOUBLE_EQ(trace["otherData"]["windows"][0]["uncovered_communication_ms"].get<double>(), 0.5);
}

TEST(ChromeTrace, KeepsNanoseconds) {
  Activity a = activity(kNorm, 0, 0), b = activity(kNorm, 0, 0);
  a.end_ns = a.start_ns + 7;
  b.start_ns = a.start_ns + 1'234'567'891'234'567;  // two weeks later
  b.end_ns = b.start_ns + 1'001;
  const std::string text = chrome_trace({timeline({a, b})});
  EXPECT_NE(text.find("\"ts\":0.000,\"dur\":0.007,"), std::string::npos) << text;
  EXPECT_NE(text.find("\"ts\":1234567891234.567,\"dur\":1.001,"), std::string::npos) << text;
}

// Viewers draw events of one track that overlap without nesting wrongly.
TEST(ChromeTrace, EventsOfATrackDoNotOverlap) {
  const RankTimeline recorded = timeline({activity(kGemm, 0, 4), activity(kNorm, 1, 5), activity(kNorm, 2, 3),
                                          activity(kNorm, 4, 6), activity(kNccl, 2, 6), activity(kNorm, 5, 7)});
  const nlohmann::json trace = nlohmann::json::parse(chrome_trace({recorded}));
  std::map<int, double> end_of_track;
  std::set<std::string> tracks;
  for (const auto& event : events_of(trace, "X")) {
    const int tid = event["tid"];
    EXPECT_GE(event["ts"].get<double>(), end_of_track[tid]) << event;
    end_of_track[tid] = event["ts"].get<double>() + event["dur"].get<double>();
    tracks.insert(track_name(trace, 0, tid));
  }
  const std::set<std::string> expected = {"steps", "stream 7", "stream 7 (beside it 1)", "stream 7 (beside it 2)",
                                          "NCCL, stream 7"};
  EXPECT_EQ(tracks, expected);
}

TEST(ChromeTrace, EscapesNames) {
  RankTimeline recorded = timeline({activity(kNorm, 0, 1)});
  recorded.label = "GPU \"x\"\\\n\xff";
  recorded.names[kNorm] = "f\"\\\t\xfe";
  const nlohmann::json trace = nlohmann::json::parse(chrome_trace({recorded}));
  EXPECT_EQ(events_of(trace, "X")[1]["name"].get<std::string>().substr(0, 4), "f\"\\\t");
}

TEST(ChromeTrace, OfNothingIsValid) {
  EXPECT_TRUE(nlohmann::json::parse(chrome_trace({}))["traceEvents"].empty());
  EXPECT_TRUE(events_of(nlohmann::json::parse(chrome_trace({timeline({})})), "X").empty());
}

// ------------------------------------------------------------ messages

TEST(TimelineMessage, ComesBackTheSame) {
  RankTimeline sent = timeline({activity(kNorm, 0, 1), activity(kNccl, 1, 2, 13)}, 3);
  sent.num_lost = 5;
  sent.windows.push_back({.first = 20, .count = 1, .stage = 2, .activities = {activity(kCopy, 4, 5)}});
  const RankTimeline received = unpack(pack(sent));
  EXPECT_EQ(received.num_lost, 5);
  EXPECT_EQ(received.windows[0].count, 3);
  EXPECT_EQ(received.windows[1].stage, 2);
  EXPECT_EQ(chrome_trace({received}), chrome_trace({sent}));
}

TEST(TimelineMessage, CutOffOrDamagedIsRefused) {
  const std::vector<std::byte> message = pack(timeline({activity(kNorm, 0, 1)}));
  for (size_t size = 0; size < message.size(); ++size) EXPECT_THROW(unpack(std::span(message).first(size)), Error) << size;
  std::vector<std::byte> longer = message;
  longer.push_back(std::byte{0});
  EXPECT_THROW(unpack(longer), Error);
  RankTimeline wrong = timeline({activity(kNorm, 0, 1)});
  wrong.windows[0].activities[0].name = 4;
  EXPECT_THROW(unpack(pack(wrong)), Error);
}

}  // namespace
}  // namespace speedrun
