def install_chunked_loss(model):
    return lambda: None
