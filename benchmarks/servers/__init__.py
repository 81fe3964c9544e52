"""Tables on servers: what a server computes, and steps beside tables on devices and gradients of all rows."""
