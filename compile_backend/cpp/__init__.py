"""The C++ compiler that compiled engines need, and what it is given of torch."""
