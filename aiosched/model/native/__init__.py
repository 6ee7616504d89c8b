"""The decode step of a dense model in C++, built on the machine that runs it."""
