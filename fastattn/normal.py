"""The upper tail of the normal distribution, as NumPy and the compiled kernels compute it."""

from __future__ import annotations

# erfc(a / sqrt(2)) / 2 = exp(-a * a / 2) P(u) / (a + pole) with u = (a - pole) / (a + pole), where
# a >= 0. P is smooth, and u takes [0, inf) to [-1, 1), where the terms of a polynomial stay small:
# the tail keeps its digits however far out. By dtype: pole, the a from which a times the tail is 0,
# and the coefficients of P, constant first, near minimax for the relative error. float32: 6.8e-9,
# float64: 7.6e-18. Form: Shepherd and Laframboise 1981, Mathematics of Computation 36, 249.
NORMAL_TAIL = {
    "float32": (
        4.25,
        14.7,
        (
            0.759554207151,
            -0.625129784731,
            0.418227613938,
            -0.220515477328,
            0.0852712041037,
            -0.0193658981273,
            -0.000746782881874,
            0.00218428838387,
            -0.000370843308645,
            -0.000237732351489,
        ),
    ),
    "float64": (
        5.5,
        39.0,
        (
            0.7737696342764067687,
            -0.68518342057433805354,
            0.53559648906249432596,
            -0.36704906529362539999,
            0.21787243285797395559,
            -0.10970308995855986843,
            0.045097580814684908385,
            -0.013923510567743595487,
            0.0024429826757304651542,
            0.00026960401561454067716,
            -0.0003245226531331884503,
            0.00007141478894513676585,
            0.000016319965384111025539,
            -0.000012118742502261649083,
            4.4643706340921046133e-7,
            1.4836373916276265796e-6,
            -2.6796598626179422946e-7,
            -1.7743314535572896881e-7,
            5.0455356368504662155e-8,
            2.2921608633735878305e-8,
            -5.7391041861814030205e-9,
            -2.6067747409681989918e-9,
        ),
    ),
}
