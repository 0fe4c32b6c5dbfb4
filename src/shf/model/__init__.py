"""A module as a function of θ, and what its graphs give: J, B, squares of per-case gradients."""
