"""Files of probe definitions: how to read, apply and save them."""
