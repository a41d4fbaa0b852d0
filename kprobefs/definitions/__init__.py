"""Files of probe definitions: reading, applying and saving them."""
