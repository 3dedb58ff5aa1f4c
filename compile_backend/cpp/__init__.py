"""The C++ compiler that compiled engines need: its headers, runtime library and toolchain."""
