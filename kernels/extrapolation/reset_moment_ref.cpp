#include <cstring>

#include "kernels/extrapolation/reset_moment.h"

namespace speedrun::kernels {

void reset_moment(const ResetMoment& args, const HostExec& /*exec*/) {
  if (args.report->refusal == JumpRefusal::none) std::memset(args.moment, 0, static_cast<size_t>(args.bytes));
}

}  // namespace speedrun::kernels
