"""The parts of benchmarks/soak: what is sent, how answers are judged, what is broken meanwhile, what is measured."""
