"""What ``keras_gpu_compat_pytest`` does when it is asked to: simulation, own processes, twins."""
