"""Parts that TensorFlow 1 and TensorFlow 2 share: graphs, rules, user-defined gradients."""
