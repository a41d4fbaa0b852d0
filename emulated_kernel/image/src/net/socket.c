// SPDX-License-Identifier: GPL-2.0-or-later
// Sockets as files, and their system calls.
#include "net.h"
#include "errno.h"
#include "inet.h"
#include "mm.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

#define SOCKFS_MAGIC 0x534f434b

static struct super_block sockfs_sb = { .s_magic = SOCKFS_MAGIC, .s_dev = 0x8, .s_pseudo = "socket" };
static const struct file_operations socket_file_ops;

static noinline struct socket *sock_alloc(int type)
{
	struct socket *sock = kzalloc(sizeof(*sock), GFP_KERNEL);

	if (sock)
		sock->type = (short)type;
	return sock;
}

static noinline void __sock_release(struct socket *sock)
{
	if (sock->ops)
		sock->ops->release(sock);
	kfree(sock);
}

void sock_release(struct socket *sock)
{
	__sock_release(sock);
}

static noinline int __sock_create(int family, int type, int protocol, struct socket **res, int kern)
{
	struct socket *sock;
	int err;

	if (family != AF_INET)
		return -EAFNOSUPPORT;
	sock = sock_alloc(type);
	if (!sock)
		return -ENFILE;
	err = inet_create(sock, protocol, kern);
	if (err)
		__sock_release(sock);
	else
		*res = sock;
	return err;
}

int sock_create_kern(int family, int type, int protocol, struct socket **res)
{
	return __sock_create(family, type, protocol, res, 1);
}

int sock_sendmsg(struct socket *sock, struct msghdr *msg)
{
	return sock->ops->sendmsg(sock, msg, msg->msg_iter.count);
}

int sock_recvmsg(struct socket *sock, struct msghdr *msg, int flags)
{
	return sock->ops->recvmsg(sock, msg, msg->msg_iter.count, flags);
}

static unsigned int nonblock_flag(const struct file *file)
{
	return file->f_flags & O_NONBLOCK ? MSG_DONTWAIT : 0;
}

static ssize_t sock_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct msghdr msg = { .msg_iter = *to, .msg_flags = nonblock_flag(iocb->ki_filp) };

	return to->count ? sock_recvmsg(iocb->ki_filp->private_data, &msg, (int)msg.msg_flags) : 0;
}

static ssize_t sock_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct msghdr msg = { .msg_iter = *from, .msg_flags = nonblock_flag(iocb->ki_filp) };

	return sock_sendmsg(iocb->ki_filp->private_data, &msg);
}

static unsigned int sock_poll(struct file *file, poll_table *wait)
{
	struct socket *sock = file->private_data;

	return sock->ops->poll(file, sock, wait);
}

static int sock_close(struct inode *inode __attribute__((unused)), struct file *filp)
{
	__sock_release(filp->private_data);
	return 0;
}

static const struct file_operations socket_file_ops = {
	.read_iter = sock_read_iter,
	.write_iter = sock_write_iter,
	.poll = sock_poll,
	.release = sock_close,
};

/* Takes over the socket, also where it fails. */
static noinline struct file *sock_alloc_file(struct socket *sock, int flags)
{
	struct inode *inode = new_inode(&sockfs_sb);
	struct file *file = ERR_PTR(-ENOMEM);

	if (inode) {
		inode_init_owner(&init_user_ns, inode, NULL, S_IFSOCK | 0777);
		inode->i_fop = &socket_file_ops;
		file = alloc_file_pseudo(inode, &sockfs_sb, O_RDWR | (flags & O_NONBLOCK), &socket_file_ops);
		if (IS_ERR(file))
			iput(inode);
	}
	if (IS_ERR(file)) {
		sock_release(sock);
		return file;
	}
	sock->file = file;
	file->private_data = sock;
	return file;
}

static noinline int sock_map_fd(struct socket *sock, int flags)
{
	int fd = get_unused_fd_flags(flags);
	struct file *file;

	if (fd < 0) {
		sock_release(sock);
		return fd;
	}
	file = sock_alloc_file(sock, flags);
	if (IS_ERR(file)) {
		put_unused_fd(fd);
		return (int)PTR_ERR(file);
	}
	fd_install(fd, file);
	return fd;
}

static noinline struct socket *sockfd_lookup_light(int fd, int *err, struct fd *f)
{
	*f = fdget(fd);
	*err = -EBADF;
	if (!f->file)
		return NULL;
	if (f->file->f_op == &socket_file_ops)
		return f->file->private_data;
	*err = -ENOTSOCK;
	fdput(*f);
	return NULL;
}

static int move_addr_to_kernel(void __user *uaddr, int ulen, struct sockaddr_in *kaddr)
{
	if (ulen < 0 || ulen > 128)
		return -EINVAL;
	*kaddr = (struct sockaddr_in){ .sin_family = AF_UNSPEC };
	return copy_from_user(kaddr, uaddr, min((size_t)ulen, sizeof(*kaddr))) ? -EFAULT : 0;
}

static int move_addr_to_user(const struct sockaddr_in *kaddr, void __user *uaddr, int __user *ulen)
{
	int len, klen = sizeof(*kaddr);

	if (copy_from_user(&len, ulen, sizeof(len)))
		return -EFAULT;
	if (len < 0)
		return -EINVAL;
	if (copy_to_user(uaddr, kaddr, min(len, klen)) || copy_to_user(ulen, &klen, sizeof(klen)))
		return -EFAULT;
	return 0;
}

static noinline int __sys_socket(int family, int type, int protocol)
{
	int flags = type & ~SOCK_TYPE_MASK, err;
	struct socket *sock;

	if (flags & ~(SOCK_CLOEXEC | SOCK_NONBLOCK))
		return -EINVAL;
	err = __sock_create(family, type & SOCK_TYPE_MASK, protocol, &sock, 0);
	return err ? err : sock_map_fd(sock, flags);
}

SYSCALL_DEFINE3(socket, int, family, int, type, int, protocol)
{
	return __sys_socket(family, type, protocol);
}

static noinline int __sys_bind(int fd, struct sockaddr __user *umyaddr, int addrlen)
{
	struct sockaddr_in address;
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = move_addr_to_kernel(umyaddr, addrlen, &address);
	if (!err)
		err = sock->ops->bind(sock, (struct sockaddr *)&address, addrlen);
	fdput(f);
	return err;
}

SYSCALL_DEFINE3(bind, int, fd, struct sockaddr __user *, umyaddr, int, addrlen)
{
	return __sys_bind(fd, umyaddr, addrlen);
}

static noinline int __sys_listen(int fd, int backlog)
{
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = sock->ops->listen(sock, backlog);
	fdput(f);
	return err;
}

SYSCALL_DEFINE2(listen, int, fd, int, backlog)
{
	return __sys_listen(fd, backlog);
}

/* A socket with the next connection of the listening one. */
static noinline int do_accept(struct socket *sock, struct socket **newsock, int flags)
{
	struct socket *new;
	int err;

	if (!sock->ops->accept)
		return -EOPNOTSUPP;
	new = sock_alloc(sock->type);
	if (!new)
		return -ENFILE;
	new->ops = sock->ops;
	err = sock->ops->accept(sock, new, flags, false);
	if (err)
		__sock_release(new);
	else
		*newsock = new;
	return err;
}

static noinline int __sys_accept4(int fd, struct sockaddr __user *upeer_sockaddr,
				  int __user *upeer_addrlen, int flags)
{
	struct sockaddr_in address;
	struct socket *newsock;
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = flags & ~(SOCK_CLOEXEC | SOCK_NONBLOCK) ? -EINVAL : 0;
	if (!err)
		err = do_accept(sock, &newsock, (int)f.file->f_flags);
	fdput(f);
	if (err)
		return err;
	if (upeer_sockaddr) {
		newsock->ops->getname(newsock, (struct sockaddr *)&address, 1);
		err = move_addr_to_user(&address, upeer_sockaddr, upeer_addrlen);
	}
	if (!err)
		return sock_map_fd(newsock, flags);
	sock_release(newsock);
	return err;
}

SYSCALL_DEFINE4(accept4, int, fd, struct sockaddr __user *, upeer_sockaddr, int __user *, upeer_addrlen,
		int, flags)
{
	return __sys_accept4(fd, upeer_sockaddr, upeer_addrlen, flags);
}

SYSCALL_DEFINE3(accept, int, fd, struct sockaddr __user *, upeer_sockaddr, int __user *, upeer_addrlen)
{
	return __sys_accept4(fd, upeer_sockaddr, upeer_addrlen, 0);
}

static noinline int __sys_connect(int fd, struct sockaddr __user *uservaddr, int addrlen)
{
	struct sockaddr_in address;
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = move_addr_to_kernel(uservaddr, addrlen, &address);
	if (!err)
		err = sock->ops->connect(sock, (struct sockaddr *)&address, addrlen, (int)f.file->f_flags);
	fdput(f);
	return err;
}

SYSCALL_DEFINE3(connect, int, fd, struct sockaddr __user *, uservaddr, int, addrlen)
{
	return __sys_connect(fd, uservaddr, addrlen);
}

static noinline int sys_getname(int fd, struct sockaddr __user *usockaddr, int __user *usockaddr_len,
				int peer)
{
	struct sockaddr_in address;
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = sock->ops->getname(sock, (struct sockaddr *)&address, peer);
	if (err >= 0)
		err = move_addr_to_user(&address, usockaddr, usockaddr_len);
	fdput(f);
	return err;
}

SYSCALL_DEFINE3(getsockname, int, fd, struct sockaddr __user *, usockaddr, int __user *, usockaddr_len)
{
	return sys_getname(fd, usockaddr, usockaddr_len, 0);
}

SYSCALL_DEFINE3(getpeername, int, fd, struct sockaddr __user *, usockaddr, int __user *, usockaddr_len)
{
	return sys_getname(fd, usockaddr, usockaddr_len, 1);
}

static noinline int __sys_sendto(int fd, void __user *buff, size_t len, unsigned int flags,
				 struct sockaddr __user *addr, int addr_len)
{
	struct sockaddr_in address;
	struct msghdr msg = { .msg_flags = flags };
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = access_ok(buff, len) ? 0 : -EFAULT;
	if (!err && addr) {
		err = move_addr_to_kernel(addr, addr_len, &address);
		msg.msg_name = &address;
	}
	if (!err) {
		msg.msg_flags |= nonblock_flag(f.file);
		iov_iter_ubuf(&msg.msg_iter, true, buff, min(len, MAX_RW_COUNT));
		err = sock_sendmsg(sock, &msg);
	}
	fdput(f);
	return err;
}

SYSCALL_DEFINE6(sendto, int, fd, void __user *, buff, size_t, len, unsigned int, flags,
		struct sockaddr __user *, addr, int, addr_len)
{
	return __sys_sendto(fd, buff, len, flags, addr, addr_len);
}

static noinline int __sys_recvfrom(int fd, void __user *ubuf, size_t size, unsigned int flags,
				   struct sockaddr __user *addr, int __user *addr_len)
{
	struct sockaddr_in address;
	struct msghdr msg = { .msg_name = addr ? &address : NULL };
	struct fd f;
	int err, err2;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = -EFAULT;
	if (access_ok(ubuf, size)) {
		iov_iter_ubuf(&msg.msg_iter, false, ubuf, min(size, MAX_RW_COUNT));
		err = sock_recvmsg(sock, &msg, (int)(flags | nonblock_flag(f.file)));
	}
	if (err >= 0 && addr && msg.msg_namelen) {
		err2 = move_addr_to_user(&address, addr, addr_len);
		if (err2 < 0)
			err = err2;
	}
	fdput(f);
	return err;
}

SYSCALL_DEFINE6(recvfrom, int, fd, void __user *, ubuf, size_t, size, unsigned int, flags,
		struct sockaddr __user *, addr, int __user *, addr_len)
{
	return __sys_recvfrom(fd, ubuf, size, flags, addr, addr_len);
}

static noinline int __sys_shutdown(int fd, int how)
{
	struct fd f;
	int err;
	struct socket *sock = sockfd_lookup_light(fd, &err, &f);

	if (!sock)
		return err;
	err = sock->ops->shutdown(sock, how);
	fdput(f);
	return err;
}

SYSCALL_DEFINE2(shutdown, int, fd, int, how)
{
	return __sys_shutdown(fd, how);
}

int kernel_bind(struct socket *sock, struct sockaddr *addr, int addrlen)
{
	return sock->ops->bind(sock, addr, addrlen);
}

int kernel_listen(struct socket *sock, int backlog)
{
	return sock->ops->listen(sock, backlog);
}

int kernel_accept(struct socket *sock, struct socket **newsock, int flags)
{
	return do_accept(sock, newsock, flags);
}

int kernel_connect(struct socket *sock, struct sockaddr *addr, int addrlen, int flags)
{
	return sock->ops->connect(sock, addr, addrlen, flags);
}

int kernel_getsockname(struct socket *sock, struct sockaddr *addr)
{
	return sock->ops->getname(sock, addr, 0);
}

int kernel_sock_shutdown(struct socket *sock, int how)
{
	return sock->ops->shutdown(sock, how);
}

__init void sock_init(void)
{
	net_dev_init();
	inet_init();
}
