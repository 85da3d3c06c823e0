"""GPU code: CUDA graphs, streams, Triton kernels and the self-test."""
