#pragma once
// What makes a message more than one line.

namespace speedrun {

// An ASCII control character: line ends, tabs, escapes.
inline bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

}  // namespace speedrun
