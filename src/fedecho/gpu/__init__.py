"""Everything that knows of a GPU: CUDA graphs, streams, Triton kernels and the self-test."""
