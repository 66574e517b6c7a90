"""From logits to tokens: one interface, made of torch on the CPU and of Triton kernels on a GPU."""
