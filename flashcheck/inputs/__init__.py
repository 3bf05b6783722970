"""What kernels are judged on: named value families, problem specs, hostile buffers."""
