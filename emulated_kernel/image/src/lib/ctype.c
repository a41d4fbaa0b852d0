// SPDX-License-Identifier: GPL-2.0-or-later
// What kind of character each byte is, in ASCII.
#include "string.h"

#define C8 _C, _C, _C, _C, _C, _C, _C, _C
#define P8 _P, _P, _P, _P, _P, _P, _P, _P
#define D5 _D, _D, _D, _D, _D
#define X6(c) (c) | _X, (c) | _X, (c) | _X, (c) | _X, (c) | _X, (c) | _X
#define L5(c) c, c, c, c, c

const unsigned char _ctype[256] = {
	C8,                                               /* 00 */
	_C, _C | _S, _C | _S, _C | _S, _C | _S, _C | _S, _C, _C, /* 08 */
	C8, C8,                                           /* 10 */
	_S | _SP, _P, _P, _P, _P, _P, _P, _P, P8,         /* 20 */
	D5, D5, _P, _P, _P, _P, _P, _P,                   /* 30 */
	_P, X6(_U), L5(_U), L5(_U), L5(_U), L5(_U),       /* 40 */
	_P, _P, _P, _P, _P,                               /* 5b */
	_P, X6(_L), L5(_L), L5(_L), L5(_L), L5(_L),       /* 60 */
	_P, _P, _P, _P, _C,                               /* 7b */
};
