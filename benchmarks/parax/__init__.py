"""One batch on 4 processes x 2 devices: who reads, decodes and sends what, by our plan and by the rules of others."""
