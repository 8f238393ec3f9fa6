"""The benchmarks of `skyformer bench`: studies that measure speed, memory and error against targets."""
