/* The encoder of plain data in _speed.c, for _repeated.c to put tensors among it. */

#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#define LARGE (64 * 1024) /* mq.extensions.LARGE */
#define MOST_LEVELS 16    /* mq.plain.MOST_LEVELS */
#define TUPLE 1           /* mq.extensions */
#define ORDERED_DICT 5
#define OBJECT 19

struct Parts;

/* What has been encoded. `parts`, if there are any, are the tensors among the data;
   only there may it be `extended`. */
typedef struct {
    unsigned char *bytes;
    size_t size, room;
    struct Parts *parts;
    int extended;
    unsigned char first[1024];
} Buffer;

struct Tensors;

/* What is being decoded. `tensors`, if there are any, are what its extensions stand for. */
typedef struct {
    const unsigned char *at, *end;
    struct Tensors *tensors;
} Source;

#pragma GCC visibility push(hidden)
/* NULL, perhaps with an exception: it is malformed, or of a kind left to the twin. */
PyObject *take_value(Source *in, int levels, int is_key);
/* An OrderedDict, or a tuple, of the body of its extension, which is all that is in the
   source. */
PyObject *take_ordered(Source *body, int levels);
PyObject *take_tuple(Source *body, int levels);
/* What an extension of so many bytes stands for. */
PyObject *take_described(Source *in, uint64_t size, int levels);
int grow(Buffer *out, size_t more);
/* -1 without an exception: it is of a kind left to the twin. `levels` are around it. */
int put_value(Buffer *out, PyObject *value, int levels);
/* The same of what is no plain data. */
int put_described(Buffer *out, PyObject *value, int levels);
int put_opcode(Buffer *out, unsigned char opcode);
/* Before each of so many elements, or pairs, of a list or dict. */
int put_count(Buffer *out, Py_ssize_t count, unsigned char few, unsigned char many);
int put_str(Buffer *out, PyObject *value);
/* What has been put since `start`, where room for `MOST_BEFORE` bytes was left, is the
   body of an extension. */
void end_extension(Buffer *out, size_t start, int code);
#pragma GCC visibility pop

#define MOST_BEFORE 6 /* bytes before the body of an extension */

/* What comes before the body of an extension, of at most 4 GiB; how many bytes that is. */
static inline int
put_before(unsigned char *place, size_t size, int code)
{
    static const unsigned char fixed[] = {[1] = 0xd4, [2] = 0xd5, [4] = 0xd6, [8] = 0xd7, [16] = 0xd8};
    unsigned char *at = place;
    if (size < sizeof fixed && fixed[size]) {
        *at++ = fixed[size];
    } else {
        int log = size <= UINT8_MAX ? 0 : size <= UINT16_MAX ? 1 : 2;
        *at++ = 0xc7 + log;
        for (int shift = 8 << log; (shift -= 8) >= 0;)
            *at++ = (unsigned char)(size >> shift);
    }
    *at++ = (unsigned char)code;
    return (int)(at - place);
}

static inline void
begin(Buffer *out, size_t size)
{
    out->bytes = out->first;
    out->room = sizeof out->first;
    out->size = size;
    out->parts = NULL;
    out->extended = 0;
}

static inline void
end(Buffer *out)
{
    if (out->bytes != out->first)
        PyMem_Free(out->bytes);
}

static inline unsigned char *
extend(Buffer *out, size_t more)
{
    if (out->size + more > out->room && grow(out, more) < 0)
        return NULL;
    unsigned char *place = out->bytes + out->size;
    out->size += more;
    return place;
}
