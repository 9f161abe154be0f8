"""zig as the C or C++ compiler of another machine and an older glibc: ``python zig.py TARGET cc|c++|ar ARGUMENT...``.

Run by path, in place of a compiler. zig spells the levels of x86-64 in its own way.
"""

import os
import sys


def main(target: str, tool: str, *arguments: str) -> None:
    """Become zig."""
    of_target = [] if tool == "ar" else ["-target", target]
    spelled = [argument.replace("-march=x86-64-v", "-march=x86_64_v") for argument in arguments]
    command = [sys.executable, "-m", "ziglang", tool, *of_target, *spelled]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
